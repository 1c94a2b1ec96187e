"""CompileSwitch: when functions are compiled, in both directions, and what happens where that fails."""

import logging

import pytest
import torch

from torchrl_perf.runtime import CaptureError, capture
from torchrl_perf.runtime.compile_switch import CompileSwitch


class Compiler:
    """Counts what it is given; its functions add 100."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    def __call__(self, fn):
        self.asked.append(fn)

        def compiled(x):
            if self.error is not None:
                raise self.error
            return fn(x) + 100

        return compiled


def plus_one(x):
    return x + 1


def make(at, *, may_go_on=False, error=None):
    compiler = Compiler(error)
    switch = CompileSwitch(compiler, at=at, may_go_on=may_go_on)
    return compiler, switch, switch.function(plus_one)


def test_eager_mode_never_compiles():
    switch = CompileSwitch(None, at=0, may_go_on=True)
    assert switch.function(plus_one) is plus_one
    switch.settle(10**6, {})
    assert not switch.on
    assert not switch.changes


def test_from_the_start_what_the_compiler_made_is_called_as_it_is():
    compiler, switch, fn = make(0)
    assert switch.on
    assert not switch.changes
    assert compiler.asked == [plus_one]
    assert fn(1) == 102


def test_the_compiler_is_not_asked_before_its_iteration_and_once():
    compiler, switch, fn = make(2)
    seen = []
    switch.follow(seen.append)
    for iteration, expected in enumerate([2, 2, 102, 102]):
        switch.settle(iteration, {})
        assert fn(1) == expected
        assert len(compiler.asked) == (iteration >= 2)
    assert seen == [True]
    switch.settle(1, {})  # an earlier state was loaded
    assert fn(1) == 2
    switch.settle(3, {})
    assert fn(1) == 102
    assert (seen, len(compiler.asked)) == ([True, False, True], 1)


def test_never():
    compiler, switch, fn = make(None)
    switch.settle(10**9, {})
    assert (fn(1), compiler.asked, switch.on) == (2, [], False)


def test_what_was_captured_warms_up_again():
    _, switch, fn = make(2)
    step = capture(fn, device="cpu", audit=False)
    seen = []
    for iteration in range(6):
        switch.settle(iteration, {}, step, print)
        seen.append(int(step(torch.tensor(1))))
    assert seen == [2, 2, 102, 102, 102, 102]
    assert step.calls == 6


def test_one_line_says_when_and_how_long(caplog):
    _, switch, _ = make(2)
    with caplog.at_level(logging.INFO, "torchrl_perf"):
        for iteration in range(6):
            switch.settle(iteration, {})
    (line,) = caplog.messages
    assert line.startswith("iteration 3: compiled kernels from here on, for which the run waited ")


class TestWhatTheCompilerRefuses:
    error = torch._dynamo.exc.Unsupported("a word that it cannot trace")

    def test_is_an_error_where_it_was_asked_for(self):
        _, switch, fn = make(1, error=self.error)
        switch.settle(1, {})
        with pytest.raises(torch._dynamo.exc.Unsupported):
            fn(1)

    def test_stays_as_it_is_otherwise_and_says_so_once(self, caplog):
        _, switch, fn = make(1, may_go_on=True, error=self.error)
        switch.settle(1, {})
        assert [fn(1), fn(2)] == [2, 3]
        (line,) = caplog.messages
        assert line.startswith("plus_one is not compiled, since the compiler refuses it: a word that it cannot trace")

    def test_other_errors_are_passed_on(self):
        _, switch, fn = make(1, may_go_on=True, error=ValueError("of the function"))
        switch.settle(1, {})
        with pytest.raises(ValueError, match="of the function"):
            fn(1)


class TestWhatCannotBeRecorded:
    @staticmethod
    def refuse(switch, error):
        """What calls a function, and refuses to record what is not compiled."""

        def run(fn, *args):
            if not switch.on:
                raise error
            return fn(*args)

        return run

    def test_is_compiled_at_once_and_noted(self, caplog):
        _, switch, fn = make(10, may_go_on=True)
        notes = {}
        switch.settle(3, notes)
        assert switch.call(self.refuse(switch, CaptureError("expected no wait")), fn, 1) == 102
        assert notes == {"compiled_from": 3}
        assert "iteration 4: kernels are compiled at once" in caplog.text
        _, resumed, again = make(10, may_go_on=True)
        resumed.settle(3, notes)
        assert again(1) == 102

    @pytest.mark.parametrize("may_go_on", [False, True])
    def test_memory_is_not_a_reason(self, may_go_on):
        _, switch, fn = make(10, may_go_on=may_go_on)
        switch.settle(3, {})
        error = CaptureError("no room")
        error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
        with pytest.raises(CaptureError, match="no room"):
            switch.call(self.refuse(switch, error), fn, 1)
        assert not switch.on

    def test_is_an_error_where_eager_kernels_were_asked_for(self):
        _, switch, fn = make(10)
        switch.settle(3, {})
        with pytest.raises(CaptureError, match="a wait"):
            switch.call(self.refuse(switch, CaptureError("a wait")), fn, 1)

    def test_is_an_error_where_it_is_compiled_already(self):
        _, switch, _ = make(0, may_go_on=True)

        def run(fn, *args):
            raise CaptureError("a wait")

        with pytest.raises(CaptureError, match="a wait"):
            switch.call(run, plus_one, 1)
