"""A thread's timing, repeatable: a task runs when somebody looks whether it is done, at a look that a seed chooses."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from random import Random
from typing import Any


class LateFuture(Future):
    """`done` may run what comes next in its executor; `result` and `exception` run all up to this."""

    def __init__(self, executor: "LateExecutor") -> None:
        super().__init__()
        self._executor = executor

    def done(self) -> bool:
        if not super().done() and self._executor.comes():
            self._executor.run_one()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self._finish()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._finish()
        return super().exception()

    def _finish(self) -> None:
        while not super().done():
            self._executor.run_one()


class LateExecutor(Executor):
    """One worker, whose next task ends at each look with the probability `pace`."""

    def __init__(self, random: Random, pace: float) -> None:
        self._random = random
        self._pace = pace
        self._tasks: deque[tuple[LateFuture, Callable[[], Any]]] = deque()

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> LateFuture:
        future = LateFuture(self)
        self._tasks.append((future, lambda: task(*arguments, **options)))
        return future

    def comes(self) -> bool:
        return self._random.random() < self._pace

    def run_one(self) -> None:
        future, task = self._tasks.popleft()
        try:
            future.set_result(task())
        except OSError as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self._tasks:
            self.run_one()
