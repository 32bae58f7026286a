"""What a test can do to a run from the inside: kill it, signal it or fail it at a chosen moment."""

import builtins
import codecs
import errno
import os
import signal

from miles.checkpoint import hf, save
from miles.engine.core import EngineCore
from miles.loop import stages
from miles.ops import sampling
from miles.trainer.optim import Optimizer


def kill_at_file_event(number: int, part: str) -> None:
    """SIGKILL this process just before call `number` (from 1) that changes or syncs a path which contains `part`."""
    count = 0

    def counted(name):
        original = getattr(os, name)

        def call(*arguments, **keywords):
            nonlocal count
            if any(part in str(argument) for argument in arguments):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        setattr(os, name, call)

    for name in ("open", "replace", "rename", "mkdir", "rmdir", "unlink"):
        counted(name)


def signal_at_stage(stage: str, number: int, step: int) -> None:
    """Send this process a signal when it enters a stage of `loop/stages.py` in a step."""
    original = getattr(stages, stage)

    def entered(run, *arguments):
        if run.num_done == step:
            os.kill(os.getpid(), number)
        return original(run, *arguments)

    setattr(stages, stage, entered)


def signal_before_update(number: int, update: int) -> None:
    """Send this process a signal after the backward passes of an optimizer step, before the weights change."""
    original = Optimizer.step

    def step(self):
        if self.num_updates == update:
            os.kill(os.getpid(), number)
        original(self)

    Optimizer.step = step


def signal_while_generating(number: int, version: int, tokens: int) -> None:
    """Send this process a signal once the engine has drawn that many tokens and has weights of this version."""
    original = EngineCore.step
    sent = False

    def step(self):
        nonlocal sent
        if not sent and self.version == version and self.counts["drawn_tokens"] >= tokens:
            sent = True
            os.kill(os.getpid(), number)
        return original(self)

    EngineCore.step = step


def no_space(part: str) -> None:
    """Opening a file for writing whose path, as the run calls it, contains `part` fails as on a full disk."""

    def refuse(path):
        if part in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    real_open = builtins.open

    def opened(path, mode="r", *arguments, **keywords):
        if set("wax+").intersection(mode):
            refuse(path)
        return real_open(path, mode, *arguments, **keywords)

    builtins.open = opened
    for module in (hf, save):
        write = module.save_file

        def save_file(tensors, path, *arguments, write=write, **keywords):
            refuse(path)
            return write(tensors, path, *arguments, **keywords)

        module.save_file = save_file


def small_files_only(limit_bytes: int) -> None:
    """A quota that the kernel enforces: no file may grow beyond this, whoever writes it."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def no_root() -> None:
    """Give up the rights of root, which no file permission holds back."""
    codecs.lookup("unicode-escape")  # the template engine looks it up late, maybe in a folder that only root reads
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def remove_working_directory() -> None:
    os.rmdir(os.getcwd())


def stdout_without_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def stdout_without_space() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def use_terminal(name: str) -> None:
    """Put the standard streams on a terminal."""
    terminal = os.open(name, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(terminal, fd)
    os.environ["TERM"] = "xterm-256color"


def other_log_probs() -> None:
    """The engine computes log-probs by another, equally good formula."""

    def by_softmax(logits_RV, ids_RK, *, temperature=1.0):
        return (logits_RV / temperature).softmax(-1).gather(1, ids_RK).log()

    sampling.row_log_probs = by_softmax
