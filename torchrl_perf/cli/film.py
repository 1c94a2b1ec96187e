"""Films of pictures: a gif by Pillow, an mp4 by ffmpeg, or a window; a file is there whole or not at all."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

__all__ = ["show", "write_film"]

SUFFIXES = (".gif", ".mp4")
WITHOUT_WINDOW = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")  # matplotlib's backends that write files


def write_film(pictures: Iterable[np.ndarray], path: Path, *, fps: int) -> int:
    """Write pictures to a file, and return how many there were.

    Args:
        pictures: uint8 ``[H, W, 3]`` each, all of one size.
        path: ``.gif`` or ``.mp4``.
        fps: pictures a second.

    Raises:
        ValueError: for another suffix, and where there is no picture.
        FileNotFoundError: for an mp4 without ffmpeg.
        OSError: if the file cannot be written; what was there is as it was.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"out: expected a name that ends in .gif or .mp4, received {path}. Remedy: {path.stem}.gif.")
    if path.suffix == ".mp4" and shutil.which("ffmpeg") is None:
        raise FileNotFoundError(
            f"out: expected the program ffmpeg for {path}, received none on the PATH. Remedy: a name that ends in "
            ".gif, or install ffmpeg."
        )
    with _beside(path) as partial:
        return _write_gif(pictures, partial, fps) if path.suffix == ".gif" else _write_mp4(pictures, partial, fps)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A place to write to, which takes the place of ``path`` once all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_gif(pictures: Iterable[np.ndarray], path: Path, fps: int) -> int:
    from PIL import Image

    first, *others = [Image.fromarray(picture).quantize(64, dither=Image.Dither.NONE) for picture in _some(pictures)]
    # a gif counts in hundredths of a second, and players slow down below two of them
    first.save(path, save_all=True, append_images=others, duration=max(20, round(1000 / fps)), loop=0)
    return 1 + len(others)


def _write_mp4(pictures: Iterable[np.ndarray], path: Path, fps: int) -> int:
    count, process = 0, None
    try:
        for picture in _some(pictures):
            if process is None:
                height, width, _ = picture.shape
                source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
                # players want yuv420p, which wants even sides
                target = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", str(path)]
                command = ["ffmpeg", "-y", "-loglevel", "error", *source, *target]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            assert process.stdin is not None
            process.stdin.write(np.ascontiguousarray(picture).tobytes())
            count += 1
        assert process is not None
        _, said = process.communicate()
        if process.returncode:
            words = said.decode(errors="replace").strip()
            raise OSError(f"out: expected a film from ffmpeg, received {words!r}. Remedy: a name that ends in .gif.")
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
    return count


def _some(pictures: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The pictures, of which there has to be one."""
    count = 0
    for count, picture in enumerate(pictures, 1):  # noqa: B007  counts
        yield picture
    if not count:
        raise ValueError(
            "play: expected an episode of at least two steps, received one that ended at the first. Remedy: more "
            "episodes, or another seed."
        )


def show(pictures: Iterable[np.ndarray], title: str, *, fps: int) -> int:
    """Show pictures in a window until they end or it is closed, and return how many there were.

    Args:
        pictures: uint8 ``[H, W, 3]`` each.
        title: of the window.
        fps: pictures a second, as far as they are made so fast.

    Raises:
        ValueError: where there is no display.
    """
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise ValueError(
            "window: expected a display, received neither DISPLAY nor WAYLAND_DISPLAY. Remedy: leave --window out, "
            "which writes a film."
        )
    import matplotlib
    from matplotlib import pyplot

    if matplotlib.get_backend().lower() in WITHOUT_WINDOW:
        raise ValueError(
            f"window: expected a window system for matplotlib, received its backend {matplotlib.get_backend()!r}. "
            "Remedy: install tkinter or PyQt6, or leave --window out."
        )
    figure = pyplot.figure(title)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    image, count = None, 0
    for count, picture in enumerate(_some(pictures), 1):  # noqa: B007  counts
        if image is None:
            image = axes.imshow(picture)
        image.set_data(picture)
        pyplot.pause(1 / fps)
        if not pyplot.fignum_exists(figure.number):
            break
    return count
