"""Results and outputs of a finished run, read chunk by chunk; those of a large run by several processes.

A chunk is some of the lines of a file. Each process takes the next chunk until none is left, so all end at the same
time. The process that began also puts the parts together, in the order of the chunks, and takes fewer of them.

Run as a program, this module is one of the helpers. It imports little, and writes its parts to a file, since a pipe
would make it wait.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from struct import Struct as Layout
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.store.shared import journal_size
from holdfast.view.outputs import read_outputs
from holdfast.view.results import find_chunks, read_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.store.rundir import RunDir

    Collect = Callable[[Callable[[float], None]], Iterator["Part"]]
    """yields all parts in the order of the chunks; gets a function that is called with the share that is done"""

_LARGE: Final = 32 << 20
"""bytes of files from which on helper processes read them, too"""
_CHUNK: Final = 16 << 20
_MOST_CHUNKS: Final = 4_000
"""so many numbers fit into a pipe"""
_MOST_HELPERS: Final = 3
_NUMBER: Final = Layout("=Q")
_RESULTS: Final = -1
"""stands for `results.json` among the numbers of files"""


class _Chunk(NamedTuple):
    file: int
    """number of the journal of outputs, or `_RESULTS`"""
    start: int
    stop: int


class GraderColumn(NamedTuple):
    """A grader that has columns."""

    name: str
    conditional: bool
    """it does not look at every row"""


class ChunkPlan(msgspec.Struct):
    """The chunks of a run, and what is needed to make columns of them."""

    root: str
    files: list[str]
    """journals of outputs, relative to the run directory"""
    graders: list[GraderColumn]
    fields: list[str]
    dataset: Any
    """state of the dataset that the fields are of"""
    chunks: list[_Chunk]
    """those at the beginning of a file first: so results come soon before their outputs"""

    @property
    def grader_names(self) -> list[str]:
        """The names of the graders."""
        return [grader.name for grader in self.graders]


class Part(msgspec.Struct):
    """The columns of a chunk."""

    chunk: int
    of_outputs: bool
    columns: dict[str, bytes]
    values: dict[str, list[str]]
    """texts that numbers in some of the columns stand for"""
    errors: list[tuple[int, str, bool]]
    """of results: number, key and presence of an output of each trial with an error"""


_part: Final = msgspec.msgpack.Decoder(Part)


def plan_chunks(rundir: RunDir, graders: list[GraderColumn], fields: list[str], dataset: Any) -> ChunkPlan | None:
    """Divide the files of a run into chunks; None if its results are missing, or written otherwise than expected."""
    if not rundir.results.exists():
        return None
    files = [str(path.relative_to(rundir.path)) for path in rundir.journals("outputs")]
    sizes = [journal_size(rundir.path / file) for file in files]
    total = sum(sizes) + rundir.results.stat().st_size
    step = max(_CHUNK, total // _MOST_CHUNKS)
    results = find_chunks(rundir.results, [*(grader.name for grader in graders), *fields], step)
    if results is None:
        return None
    shares = [(number / len(results), _Chunk(_RESULTS, *bounds)) for number, bounds in enumerate(results)]
    for file, size in enumerate(sizes):
        shares += [(start / size, _Chunk(file, start, min(size, start + step))) for start in range(0, size, step)]
    return ChunkPlan(str(rundir.path), files, graders, fields, dataset, [chunk for _, chunk in sorted(shares)])


def _read_part(plan: ChunkPlan, number: int) -> Part:
    file, start, stop = plan.chunks[number]
    if file == _RESULTS:
        return Part(number, False, *read_results(plan.root, plan.grader_names, plan.fields, start, stop))
    return Part(number, True, *read_outputs(Path(plan.root, plan.files[file]), file, start, stop), [])


@contextmanager
def sharing_chunks(plan: ChunkPlan) -> Iterator[Collect]:
    """Begin to read the chunks of a run, those of a large one in helper processes.

    Yields a function that helps them and yields all parts. It raises ValueError if results are not as expected or a
    helper has failed, and OSError if a file cannot be read.
    """
    with ExitStack() as stack:
        helpers: list[_Helper] = []
        claimed: Iterable[int] = range(len(plan.chunks))
        if sum(chunk.stop - chunk.start for chunk in plan.chunks) > _LARGE:
            claims, end = os.pipe()
            stack.callback(os.close, claims)
            os.write(end, b"".join(map(_NUMBER.pack, claimed)))
            os.close(end)
            claimed = _claim(claims)
            for _ in range(max(1, min(_MOST_HELPERS, (os.cpu_count() or 1) - 1))):
                helpers.append(_Helper(plan, claims))
                stack.callback(helpers[-1].end)

        def collect(progress: Callable[[float], None]) -> Iterator[Part]:
            read: dict[int, Part] = {}
            following = 0
            for number in claimed:
                progress(number / len(plan.chunks))
                read[number] = _read_part(plan, number)
                for helper in helpers:
                    read |= helper.new_parts()
                while following in read:
                    yield read.pop(following)
                    following += 1
            for helper in helpers:
                if helper.process.wait():
                    raise ValueError("a helper process has failed")
                read |= helper.new_parts()
            if len(read) != len(plan.chunks) - following:
                raise ValueError("parts are missing")
            yield from (read.pop(number) for number in sorted(read))

        yield collect


class _Helper:
    """A process that writes parts to a file, each behind its length."""

    def __init__(self, plan: ChunkPlan, claims: int) -> None:
        command = [sys.executable, "-P", "-m", "holdfast.view.chunks", str(claims)]
        self._file = TemporaryFile()
        self._place = 0
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._file, pass_fds=[claims])
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # a process that has ended is noticed later
            pipe.write(msgspec.json.encode(plan))

    def new_parts(self) -> dict[int, Part]:
        """Return the parts that were written since the last call; raises ValueError where something else is written."""
        parts, fd = {}, self._file.fileno()
        left = os.fstat(fd).st_size - self._place
        while left > _NUMBER.size:
            (size,) = _NUMBER.unpack(os.pread(fd, _NUMBER.size, self._place))
            left -= _NUMBER.size + size
            if left < 0:
                break  # it is still being written
            try:
                part = _part.decode(os.pread(fd, size, self._place + _NUMBER.size))
            except msgspec.DecodeError as error:
                raise ValueError("not a part") from error
            parts[part.chunk] = part
            self._place += _NUMBER.size + size
        return parts

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self._file.close()


def _claim(claims: int) -> Iterator[int]:
    """Yield numbers of chunks that no other process takes: they are in a pipe, and reading one takes it out."""
    while number := os.read(claims, _NUMBER.size):
        yield _NUMBER.unpack(number)[0]


def main() -> None:
    """Read chunks, and write their parts to standard output."""
    gc.disable()  # nothing here has cycles, and looking for them takes half of the time
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=ChunkPlan)
    for number in _claim(int(sys.argv[1])):
        part = msgspec.msgpack.encode(_read_part(plan, number))
        sys.stdout.buffer.write(_NUMBER.pack(len(part)) + part)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError, ValueError):  # the viewer has ended, or reads the run in another way
        sys.exit(1)
