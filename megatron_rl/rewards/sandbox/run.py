"""One job in its sandbox, from start until nothing of it is left: descriptors, clocks, caps, the end.

Nothing here blocks. The supervisor calls in when a descriptor is readable, a child ended, or time has passed.
"""

from __future__ import annotations

import fcntl
import math
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.rewards.sandbox.box import Box
from megatron_rl.rewards.sandbox.bubblewrap import BOX, ENVIRONMENT, Bubblewrap, build_command
from megatron_rl.rewards.sandbox.interpreter import Interpreter
from megatron_rl.rewards.sandbox.jobs import Job, JobKind, Limits, Outcome, Status
from megatron_rl.rewards.sandbox.plain import PlainFolder
from megatron_rl.rewards.sandbox.processes import die_with_parent, tree_usage

_CHUNK = 1 << 16
_TAIL_BYTES = 2000
_OPEN_FILES = 64
_OWN_PROCESSES = 3  # bubblewrap's two, and one while it sets up
_LOOK_EVERY_S = 0.1  # at the memory and number of processes
_MEMORY_FACTOR = 2  # of all processes of a run together, over the address space of one
_PROGRAM, _DRIVER, _CHECKER, _VALUES = (
    f"{BOX}/{name}.py" for name in ("program", "driver", "checker", "box_values")
)
_TESTS = f"{BOX}/tests.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What every run of this host is started with. `processes_before`: of our own uid, where runs share it.

    `bubblewrap` None: without isolation, which somebody asked for by name.
    """

    bubblewrap: Bubblewrap | None
    interpreter: Interpreter
    seccomp: bytes | None
    processes_before: int = 0

    def texts(self) -> dict[str, bytes]:
        """The text of the driver, the checker and what both import, by path inside."""
        folder = Path(__file__).parent / "inside"
        return {path: (folder / Path(path).name).read_bytes() for path in (_DRIVER, _CHECKER, _VALUES)}


class Run:
    """`start`, then `read`, `tick` and `reaped` until `is_over`, then `outcome`."""

    def __init__(self, job: Job, launch: Launch, texts: dict[str, bytes], uid: int | None) -> None:
        self.job, self._launch, self._texts, self._uid = job, launch, texts, uid
        self._boxes: list[Box] = []
        self._readers: dict[int, str] = {}  # descriptor: "output", "noise", or the index of its box
        self._to_close: list[int] = []
        self._output, self._noise, self._num_bytes = bytearray(), b"", 0
        self._verdict: tuple[Status, str] | None = None
        self._began = self._next_look = time.monotonic()
        self.is_ending = False

    def start(self) -> None:
        """Start its sandbox, or two. What fails here becomes the outcome, a SANDBOX_ERROR."""
        try:
            if self.job.kind is JobKind.ASSERT:
                self._start_pair()
            else:
                self._start_single()
        except (OSError, subprocess.SubprocessError) as error:
            self.end(Status.SANDBOX_ERROR, f"cannot start: {error}")
        finally:
            for descriptor in self._to_close:
                os.close(descriptor)
            self._to_close.clear()

    @property
    def descriptors(self) -> list[int]:
        """To wait for."""
        return list(self._readers)

    @property
    def deadline(self) -> float:
        return self._began + self.job.limits.wall_s

    @property
    def pids(self) -> set[int]:
        """Of its sandboxes, as far as they are known."""
        return {pid for box in self._boxes for pid in (box.process.pid, box.init) if pid is not None}

    def read(self, descriptor: int) -> bool:
        """Take a piece of what can be read now, False for none; closes the descriptor at its end."""
        kind = self._readers.get(descriptor)
        if kind is None:
            return False
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            del self._readers[descriptor]
            os.close(descriptor)
        elif kind.isdigit():
            self._boxes[int(kind)].hear(data)
        else:
            self._num_bytes += len(data)
            if self._num_bytes > self.job.limits.output_mib << 20:
                # also of one that ended by itself before we read it all
                self._verdict = self._verdict or (
                    Status.OUTPUT_LIMIT,
                    f"wrote more than {self.job.limits.output_mib} MiB",
                )
                self.end(*self._verdict)
            elif kind == "output":
                self._output += data
            else:
                self._noise = (self._noise + data)[-_TAIL_BYTES:]
        return True

    def tick(self, now: float) -> None:
        """Look at the clock and at memory."""
        if self.is_ending:
            self._kill()
            return
        limits = self.job.limits
        if now >= self.deadline:
            self.end(Status.TIMEOUT, f"killed after {limits.wall_s:g} s")
            return
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        usage = [tree_usage(box.init) for box in self._boxes if box.init is not None]
        if any(memory > _MEMORY_FACTOR * limits.memory_mib << 20 for _, memory in usage):
            self.end(
                Status.MEMORY,
                f"its processes together held more than {_MEMORY_FACTOR} times {limits.memory_mib} MiB",
            )
        elif any(count > limits.processes + _OWN_PROCESSES for count, _ in usage):
            self.end(Status.RUNTIME_ERROR, f"had more than {limits.processes} processes")

    def reaped(self, pid: int, code: int) -> bool:
        """Whether the child that ended was one of its sandboxes; the first one's end is that of the run."""
        for index, box in enumerate(self._boxes):
            if box.process.pid == pid:
                self._drain_status(box)
                box.reap(code)
                if index == 0:
                    self.is_ending = True
                    self._kill()
                elif box.exit_code is None:
                    # the candidate's own sandbox failed: no fault of the candidate's
                    self.end(Status.SANDBOX_ERROR, f"bubblewrap of the candidate ended with {code}")
                return True
        return False

    def end(self, status: Status, detail: str) -> None:
        """Kill it; the first reason given counts."""
        if not self.is_ending:
            self._verdict = (status, detail)
        self.is_ending = True
        self._kill()

    def is_over(self) -> bool:
        """Nothing of it lives any more and everything it wrote was read."""
        if not self.is_ending or not all(box.is_gone() for box in self._boxes):
            return False
        for descriptor in self.descriptors:
            while self.read(descriptor):
                pass
        return not self._readers

    def outcome(self) -> Outcome:
        status, detail = self._verdict or self._own_end()
        seconds = time.monotonic() - self._began
        return Outcome(
            id=self.job.id, status=status, output=bytes(self._output), detail=detail, seconds=seconds
        )

    def _own_end(self) -> tuple[Status, str]:
        box, limits = self._boxes[0], self.job.limits
        last_words = self._noise.decode("utf-8", "replace").strip().splitlines()[-1:]
        detail = last_words[0][:200] if last_words else ""
        if box.exit_code is None:
            return (
                Status.SANDBOX_ERROR,
                f"bubblewrap ended with {box.process.returncode} before the program: {detail}",
            )
        if box.exit_code == 0:
            return Status.FINISHED, ""
        if detail.startswith("MemoryError"):
            return Status.MEMORY, detail
        killed_late = box.exit_code == 128 + signal.SIGKILL and time.monotonic() - self._began >= limits.cpu_s
        if box.exit_code == 128 + signal.SIGXCPU or killed_late:
            return Status.TIMEOUT, f"used {limits.cpu_s:g} s of CPU time"
        return Status.RUNTIME_ERROR, f"exit code {box.exit_code}{': ' if detail else ''}{detail}"

    def _start_single(self) -> None:
        noise, files = self._pipe("noise"), {_PROGRAM: self.job.program}
        if self.job.kind is JobKind.STDIN:
            # reading /dev/stdin by name needs /proc, unless the file stands there
            files["/dev/stdin"] = self.job.payload
            self._spawn(
                [_PROGRAM],
                files,
                stdin=self._blob(self.job.payload),
                stdout=self._pipe("output"),
                noise=noise,
            )
            return
        requests, replies = self._blob(self.job.payload), self._pipe("output")
        files |= self._own(_DRIVER)
        arguments = [_DRIVER, str(requests), str(replies), _PROGRAM]
        self._spawn(arguments, files, noise=noise, keep=(requests, replies))

    def _start_pair(self) -> None:
        """The checker with the tests in one sandbox, the candidate that it asks in another."""
        noise, record = self._pipe("noise"), self._pipe("output")
        requests_read, requests_write = self._inner_pipe()
        replies_read, replies_write = self._inner_pipe()
        files = {_TESTS: self.job.payload, **self._own(_CHECKER)}
        checker = [_CHECKER, str(record), str(requests_write), str(replies_read), _TESTS]
        self._spawn(checker, files, noise=noise, keep=(record, requests_write, replies_read))
        files = {_PROGRAM: self.job.program, **self._own(_DRIVER)}
        candidate = [_DRIVER, str(requests_read), str(replies_write), _PROGRAM]
        self._spawn(candidate, files, noise=noise, keep=(requests_read, replies_write))

    def _spawn(
        self,
        arguments: list[str],
        files: dict[str, bytes],
        *,
        noise: int,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        keep: tuple[int, ...] = (),
    ) -> None:
        folder = None
        if self._launch.bubblewrap is None:
            assert self._uid is not None
            folder = PlainFolder(files, self._uid)
            command, inherited = folder.command(self._launch.interpreter, arguments), list(keep)
        else:
            command, inherited = self._confined(self._launch.bubblewrap, arguments, files)
            inherited += keep
        limits, processes = self.job.limits, self._launch.processes_before
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=noise if stdout is None else stdout,
            stderr=noise,
            env=ENVIRONMENT,
            cwd="/" if folder is None else folder.work,
            pass_fds=inherited,
            start_new_session=True,
            umask=0o077,
            # from root: an unprivileged uid before bubblewrap starts, or its uid inside would be root outside
            user=self._uid,
            group=self._uid,
            extra_groups=None if self._uid is None else [],
            preexec_fn=lambda: _prepare(limits, processes),
        )
        self._boxes.append(Box(process, folder=folder, uid=self._uid))

    def _confined(
        self, bubblewrap: Bubblewrap, arguments: list[str], files: dict[str, bytes]
    ) -> tuple[list[str], list[int]]:
        """The command line, and the descriptors that it names."""
        status = self._pipe(str(len(self._boxes)))
        sources = [(self._blob(content), path) for path, content in files.items()]
        seccomp = None if self._launch.seccomp is None else self._blob(self._launch.seccomp)
        command = build_command(
            bubblewrap,
            self._launch.interpreter,
            self.job.limits,
            files=sources,
            status=status,
            seccomp=seccomp,
            arguments=arguments,
        )
        inherited = [status, *(source for source, _ in sources)]
        return command, inherited if seccomp is None else [*inherited, seccomp]

    def _own(self, main: str) -> dict[str, bytes]:
        return {path: self._texts[path] for path in (main, _VALUES)}

    def _pipe(self, kind: str) -> int:
        """The end to write to; ours is read into `kind`."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._readers[ours] = kind
        self._to_close.append(theirs)
        return theirs

    def _inner_pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._to_close += ends
        return ends

    def _blob(self, content: bytes) -> int:
        """A descriptor to read `content` from, which nobody can write to."""
        with os.fdopen(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as stream:
            stream.write(content)
            stream.flush()
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(stream, fcntl.F_ADD_SEALS, seals)
            descriptor = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        self._to_close.append(descriptor)
        return descriptor

    def _drain_status(self, box: Box) -> None:
        for descriptor, kind in list(self._readers.items()):
            if kind == str(self._boxes.index(box)):
                self.read(descriptor)

    def _kill(self) -> None:
        for box in self._boxes:
            self._drain_status(box)
            box.kill()


def _prepare(limits: Limits, processes_before: int) -> None:
    """In the child, before bubblewrap: limits that everything below inherits and cannot raise."""
    die_with_parent()
    cpu_s = math.ceil(limits.cpu_s)
    wanted: Iterable[tuple[int, int, int]] = (
        (resource.RLIMIT_AS, limits.memory_mib << 20, limits.memory_mib << 20),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits.tmp_mib << 20, limits.tmp_mib << 20),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        # per uid over the whole machine
        (
            resource.RLIMIT_NPROC,
            *2 * (processes_before + limits.processes + _OWN_PROCESSES,),
        ),
    )
    for what, soft, hard in wanted:
        _, most = resource.getrlimit(what)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(what, (soft, hard))
    # the address space bounds the stack. One with a size would be that of every thread too, of which few would then
    # fit, and programs that ask for more, as contest sites let them, would fail
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (most, most))
