"""Runs of pytest in forks of a process that has imported the slow packages, so that no run pays for them again."""

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

__all__ = ["PRELOADED", "Only", "Watch", "preload", "run_tests"]

PRELOADED = (
    *("torch", "torch._dynamo", "tensordict.nn", "gymnasium"),
    *("torchrl.collectors", "torchrl.data", "torchrl.envs", "torchrl.modules", "torchrl.objectives"),
)


def preload(modules: Iterable[str]) -> None:
    """Import what every run needs and no fault changes; one thread, since others do not outlive a fork."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)


class Watch:
    """Plugin that notes for each test how long it takes and which functions of a folder it calls.

    What a fixture of a wider scope or the import of a file calls counts for every test below it. Functions that only a
    compiled graph or another process runs are not seen.
    """

    def __init__(self, folder: Path, slowest: float) -> None:
        """Watch the functions of a folder, and end tests that take more than ``slowest`` seconds."""
        self._folder = f"{folder}{os.sep}"
        self._slowest = slowest
        self._seconds: dict[str, float] = {}
        self._called: dict[str, set[CodeType]] = {}
        self._now: set[CodeType] = set()
        self._slow: set[str] = set()
        self._failed: set[str] = set()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._now.add(frame.f_code)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Give every test the limit, before any of its own."""
        for item in items:
            item.add_marker(pytest.mark.timeout(self._slowest), append=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note the calls of a test and its time."""
        start = time.perf_counter()
        with self._noting(item.nodeid):
            try:
                return (yield)
            finally:
                self._seconds[item.nodeid] = time.perf_counter() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """Note what a file calls when it is imported, for all of its tests."""
        with self._noting(collector.nodeid):
            return (yield)

    @contextlib.contextmanager
    def _noting(self, node: str) -> Iterator[None]:
        self._now = self._called.setdefault(node, set())
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """Note the calls of a wider fixture for the node that owns it."""
        if fixturedef.scope == "function":
            return (yield)
        before, self._now = self._now, self._called.setdefault(request.node.nodeid, set())
        try:
            return (yield)
        finally:
            self._now = before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell the tests that were ended from those that failed."""
        if report.failed:
            (self._slow if "Timeout (>" in report.longreprtext else self._failed).add(report.nodeid)

    def found(self) -> dict[str, Any]:
        """What was noted: ``tests`` (by name: seconds, places of the functions called), ``slow`` and ``failed``."""
        places = {node: sorted(self._places(called)) for node, called in self._called.items()}
        tests = {
            name: (seconds, [place for node in places if name.startswith(node) for place in places[node]])
            for name, seconds in self._seconds.items()
            if name not in self._slow | self._failed
        }
        return {"tests": tests, "slow": sorted(self._slow), "failed": sorted(self._failed)}

    def _places(self, called: Iterable[CodeType]) -> set[tuple[str, int]]:
        own = [code for code in called if code.co_filename.startswith(self._folder)]
        return {(code.co_filename.removeprefix(self._folder), code.co_firstlineno) for code in own}


class Only:
    """Plugin that runs the tests of a list and no others, in its order, and notes the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        """Run these tests, in this order."""
        self._places = {test: place for place, test in enumerate(tests)}
        self._failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose and sort."""
        chosen = [item for item in items if item.nodeid in self._places]
        items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the tests that fail."""
        if report.failed:
            self._failed.append(report.nodeid)

    def found(self) -> dict[str, Any]:
        """What was noted: ``failed``."""
        return {"failed": self._failed}


def run_tests(
    root: Path, arguments: Sequence[str], plugin: Watch | Only, limit: float, found: Path
) -> tuple[int | None, dict[str, Any]]:
    """Run pytest in a tree, in a fork of this process.

    Args:
        root: of the tree.
        arguments: of pytest: files below the tree, and options.
        plugin: that watches or chooses.
        limit: seconds.
        found: file that takes what the plugin noted; the output of pytest lies beside it, as ``.log``.

    Returns:
        the exit code, None if the limit was reached, and what the plugin noted.
    """

    def work() -> int:
        os.chdir(root)
        # compiled files are told apart by size and second alone, which two faults may share
        sys.dont_write_bytecode = True
        os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
        sys.path.insert(0, str(root))
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(root), *arguments], plugins=[plugin]))
        found.write_text(json.dumps(plugin.found()), encoding="utf-8")
        return code

    found.unlink(missing_ok=True)
    code = _forked(work, found.with_suffix(".log"), limit)
    return code, json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}


def _forked(work: Callable[[], int], log: Path, limit: float) -> int | None:
    """Do work in a fork, in a session of its own that ends with it; its exit code, None at the limit."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = work()
        except BaseException:  # whatever it is, it ends this process alone
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    until = time.monotonic() + limit
    status = None
    while status is None and time.monotonic() < until:
        time.sleep(0.02)
        done, ended = os.waitpid(child, os.WNOHANG)
        status = ended if done else None
    with contextlib.suppress(ProcessLookupError):  # what a test has started and left
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)
