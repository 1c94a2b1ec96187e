# ruff: noqa
"""What a GPU's processor would give to kernels: compiled for sm_90 without a GPU, with registers, spills and shared memory.

    python prepared/resources.py            the kernels of perceptrons whose weights stay on chip, 256-256

A launch is recorded instead of made: `compiled` stands in for `torchrl_perf.kernels.launch.launch`.
"""

import pathlib
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
TARGET = GPUTarget("cuda", 90, 32)
DUMP = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def _type(arg):
    if isinstance(arg, tuple):
        return tuple(map(_type, arg))
    if isinstance(arg, torch.Tensor):
        return TYPES[arg.dtype]
    return "i1" if isinstance(arg, bool) else "i32" if isinstance(arg, int) else "fp32"


def resources(kernel, args, constants, **options):
    """Registers of a thread, bytes of stack (spills), of shared memory, and counts of instructions."""
    names = kernel.arg_names
    signature, attributes, fixed = {}, {}, {}
    whole = [["tt.divisibility", 16]]
    for i, (name, arg) in enumerate(zip(names, args, strict=False)):
        signature[name] = _type(arg)
        if isinstance(arg, tuple):
            attributes |= {(i, j): whole for j in range(len(arg))}
        elif isinstance(arg, int) and arg == 1:  # Triton makes it a constant
            signature[name], fixed[(i,)] = "constexpr", 1
        elif isinstance(arg, torch.Tensor) or (isinstance(arg, int) and arg % 16 == 0):
            attributes[(i,)] = whole
    for name, value in constants.items():
        signature[name], fixed[(names.index(name),)] = "constexpr", value
    made = triton.compile(ASTSource(kernel, signature, fixed, attributes), target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([DUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([DUMP, "-sass", file.name], capture_output=True, text=True).stdout
    layouts = made.asm["ttgir"].count("ttg.convert_layout")
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text))
    count = lambda pattern: len(re.findall(pattern, sass))
    return {
        "registers": int(found["REG"]), "stack": int(found["STACK"]), "local": int(found.get("LOCAL", 0)),
        "shared": made.metadata.shared, "warps": made.metadata.num_warps,
        "spilled": (count(r"\bSTL"), count(r"\bLDL")), "HGMMA": count("HGMMA"), "HMMA": count("HMMA"),
        "LDGSTS": count("LDGSTS"), "LDG128": count(r"LDG\.E\.128"), "LDG": count(r"LDG\.E"),
        "STG": count(r"STG\.E"), "BAR": count(r"BAR\.SYNC"), "LDS": count(r"\bLDS"), "STS": count(r"\bSTS"),
        "SHFL": count("SHFL"), "layouts": layouts, "lines": count(r"\n\s+/\*[0-9a-f]{4,5}\*/"), "sass": sass,
    }  # fmt: skip


def compiled(kernel, grid, args, constants, **options):
    """Stands in for a launch: prints what it would need."""
    found = resources(kernel, args, constants, **options)
    found.pop("sass")
    limit = "  OVER 227 kB" if found["shared"] > 232448 else ""
    print(
        f"  {kernel.__name__:28} grid {grid!s:14}",
        *(f"{k} {v}" for k, v in found.items() if v not in (0, (0, 0))),
        limit,
    )


def resident():
    from torchrl_perf.kernels import resident_launch
    from torchrl_perf.kernels.chain_launch import Network

    resident_launch.launch = compiled
    for precision, activation in (("tf32", "tanh"), ("bf16", "tanh"), ("fp16", "relu")):
        for sizes in ((4, 256, 256, 2), (4, 256, 256, 1), (17, 256, 256, 6)):
            print(precision, activation, sizes)
            net, rows = Network(sizes, activation, 0.0, precision), 65_536
            params = [torch.empty(s) for a, b in zip(sizes, sizes[1:], strict=False) for s in ((b, a), (b,))]
            x, grad = torch.empty(rows, sizes[0]), torch.empty(rows, sizes[-1])
            start = (params[2].numel() + params[4].numel() + 15) // 16 * 16
            _, kept = resident_launch.forward(x, params, net, start, True, 132)
            resident_launch.forward(x, params, net, start, False, 132)
            resident_launch.backward(grad, x, params[4], net, start, kept, 132)


if __name__ == "__main__":
    resident()
