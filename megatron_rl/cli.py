"""The command line: parses, dispatches, and turns errors meant for the user into one block and exit code 2.

Heavy packages are imported by the commands that need them: `check` answers without torch.
"""

from __future__ import annotations

import argparse
import errno
import io
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from megatron_rl import __version__
from megatron_rl.arguments import CommandParser, add_recipe, positive_int
from megatron_rl.data.command import add_data
from megatron_rl.errors import LostPeerError, MegatronRLError
from megatron_rl.estimate.command import add_check
from megatron_rl.evaluation.arguments import add_eval
from megatron_rl.platform.process import end_process, run_process
from megatron_rl.recipe.hosts import HostPort, parse_host_port
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.resolve import check_recipe, smallest_world
from megatron_rl.score.arguments import add_score
from megatron_rl.train import launcher
from megatron_rl.train.rank_process import (
    RankProcess,
    is_launched,
    rank_environment,
    report_failure,
    stale_stop,
)
from megatron_rl.train.run_dir import LOGS, check_unused, choose_run_dir, make_run_dir
from megatron_rl.train.stopping import REASONS, STOPPED, STOPPED_FILE, Stopped, forget_requests, write_stopped
from megatron_rl.verify.arguments import add_verify

LOST_PEER, USER_ERROR, INTERRUPTED = 1, 2, 130
# what a disk or its owner refuses; without a file name, other OS errors are ours (a lost connection, a bad handle)
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


def run() -> NoReturn:
    """The `megatron-rl` command: the whole of this process."""
    write_any_text(sys.stdout, sys.stderr)
    run_process(main)


def write_any_text(*streams: TextIO | None) -> None:
    """What a stream's encoding has no place for is escaped: a path, or a bar of a curve, must not end a run."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        args = _parse(list(sys.argv[1:] if argv is None else argv))
        code: int = args.run(args)
        return code
    except LostPeerError as error:
        # a consequence: the rank that stopped has the cause, and its report comes first
        if not report_failure(str(error), exit_code=LOST_PEER, is_consequence=True):
            print(f"error: {error}", file=sys.stderr)
        return LOST_PEER
    except MegatronRLError as error:
        return _user_error(str(error))
    except KeyboardInterrupt:
        if not is_launched():
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK_ERRORS):
            return _user_error(_about_a_file(error))
        if not report_failure(traceback.format_exc(), exit_code=1):
            raise
        return 1


def _user_error(message: str) -> int:
    if not report_failure(message, exit_code=USER_ERROR):
        print(f"error: {message}", file=sys.stderr)
    return USER_ERROR


def _about_a_file(error: OSError) -> str:
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    place = names or "a file of this run"
    return (
        f"{place}: {error.strerror or error}; check that it can be read or written and that its disk has room"
    )


def _train(args: argparse.Namespace) -> int:
    loaded = load_recipe(args.recipe, args.overrides)
    rank = rank_environment()
    if rank is None:
        world_size = args.nproc or smallest_world(loaded.recipe)
    elif args.nproc is not None and not is_launched():
        raise MegatronRLError("--nproc: not allowed under torchrun, which has started the ranks already")
    else:
        world_size = rank.world_size
    check_recipe(loaded, world_size=world_size)
    if rank is not None and args.run_dir is None:
        raise MegatronRLError("--run-dir: required under torchrun, so that all ranks write to the same one")
    run_dir = args.run_dir
    # the other ranks would see what rank 0 has written already
    if rank is None or rank.rank == 0:
        run_dir = choose_run_dir(args.run_dir, name=loaded.recipe.name, resume=args.resume)
        make_run_dir(run_dir)
        if not is_launched():
            check_unused(run_dir)
            forget_requests(run_dir, stale=stale_stop())
    # without checkpoints there is nothing to reach a step border for
    stop_grace_s = loaded.recipe.run.stop_grace_s if loaded.recipe.checkpoint else None
    if rank is None and world_size > 1:
        command = [sys.executable, "-m", "megatron_rl", "train", args.recipe, "--run-dir", str(run_dir)]
        command += ["--resume"] * args.resume + args.overrides
        return launcher.launch_local(
            command,
            nproc=world_size,
            log_dir=run_dir / LOGS,
            stop_grace_s=stop_grace_s,
        )
    process = RankProcess(run_dir, stop_grace_s=stop_grace_s, leave=_leave)
    try:
        from megatron_rl.platform.quiet import silence_library_warnings

        silence_library_warnings()
        from megatron_rl.platform.loading import loading_libraries

        with loading_libraries():
            from megatron_rl.platform.device import import_megatron

            import_megatron()
            from megatron_rl.train.run import run_training

        run_training(loaded, resume=args.resume, process=process)
        return 0
    except Stopped as stopped:
        return _stopped(stopped, process)
    finally:
        process.close()


def _stopped(stopped: Stopped, process: RankProcess) -> int:
    """The exit code of a rank that ended on request."""
    if (process.run_dir / STOPPED_FILE).exists():
        # at a step border: rank 0 has said what it saved
        return stopped.exit_code
    if stopped.exit_code == STOPPED:
        phase = process.phases.current
        # what an earlier start saved is still the latest
        write_stopped(
            process.run_dir,
            reason=REASONS[process.stop.reason],
            stage=phase.stage,
            step=phase.step,
            checkpoint=None,
        )
    if not is_launched() and process.place.rank == 0:
        print(f"stopped: {stopped}", file=sys.stderr)
    return stopped.exit_code


def _leave(process: RankProcess, stopped: Stopped) -> NoReturn:
    """End this process here and now, with nothing begun that would have to be closed."""
    code = _stopped(stopped, process)
    process.close()
    end_process(code)


def _engine(args: argparse.Namespace) -> int:
    from megatron_rl.rollout.engine_host import run_engine_host

    run_engine_host(args.listen, secret_file=args.secret_file, log_dir=args.log_dir)
    return 0


def _report(args: argparse.Namespace) -> int:
    from megatron_rl.report.page import write_report

    print(write_report(args.run_dirs, args.out, say=lambda line: print(line, file=sys.stderr)))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser: argparse.ArgumentParser = CommandParser(
        prog="megatron-rl",
        description="Post-training of reasoning models: SFT and RL on megatron-core and vLLM.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    by_name = {
        "train": _train_parser(commands),
        "check": add_check(commands),
        "engine": _engine_parser(commands),
        "report": _report_parser(commands),
    }
    add_score(commands)
    add_data(commands)
    add_eval(commands)
    proofs = add_verify(commands)
    if argv[:1] == ["verify"] and argv[1:2] and argv[1] in proofs:
        return proofs[argv[1]].parse_intermixed_args(argv[2:])
    # intermixed: options may stand between overrides, which sub-parsers alone do not allow
    if argv and argv[0] in by_name:
        return by_name[argv[0]].parse_intermixed_args(argv[1:])
    return parser.parse_args(argv)


def _train_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    train = commands.add_parser("train", help="run all stages of a recipe")
    add_recipe(train)
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="where to write (default: runs/NAME-TIME)")
    train.add_argument(
        "--nproc", type=positive_int, metavar="N", help="local ranks (default: the fewest that fit)"
    )
    train.add_argument("--resume", action="store_true", help="continue the run in --run-dir")
    train.set_defaults(run=_train)
    return train


def _engine_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    engine = commands.add_parser(
        "engine",
        help="run generation engines on this machine for a trainer on another",
        description="Start engines for the trainer whose recipe lists this machine in engine.hosts, one run at a "
        "time, until Ctrl-C. They end with their trainer. Models have to be at the same path as there.",
    )
    engine.add_argument(
        "--listen", type=_host_port, required=True, metavar="ADDRESS:PORT", help="of this machine"
    )
    engine.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="required unless ADDRESS is a loopback address; the recipe's engine.secret_file holds the same",
    )
    engine.add_argument(
        "--log-dir",
        type=Path,
        default=Path("engine_logs"),
        metavar="DIR",
        help="logs of the engines (default: engine_logs)",
    )
    engine.set_defaults(run=_engine)
    return engine


def _report_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    report = commands.add_parser(
        "report",
        help="write one HTML page of a run, or of several side by side",
        description="One file with curves, tables and rollouts to read, which needs no network. Several runs are "
        "compared. A run that is still going is shown as far as it has come.",
    )
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write (default: report.html in the first RUN_DIR)"
    )
    report.set_defaults(run=_report)
    return report


def _host_port(text: str) -> HostPort:
    try:
        return parse_host_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
