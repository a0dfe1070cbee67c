"""TensorBoard's event file, written by the caller's thread: a full disk is an error where it happens.

torch's writer has a thread of its own, which prints a traceback and tells nobody until the next call.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_rl.train.files import append_whole

_BUCKETS = 30


class Board:
    """One event file below `folder`, made at the first point. A point is on the disk when `add` returns."""

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        """Points of earlier event files from `purge_step` on are hidden: they will be written again."""
        self._folder, self._purge_step = folder, purge_step
        self._stream: IO[bytes] | None = None

    def add(
        self,
        values: Mapping[str, float],
        *,
        step: int,
        histograms: Mapping[str, Sequence[float]] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """What belongs to one step; texts are shown as they are. Raises OSError; the file then holds no part of it."""
        if not (values or histograms or texts):
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        points += [_histogram(name, every) for name, every in (histograms or {}).items() if every]
        points += [_text(name, text) for name, text in (texts or {}).items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def add_once(self, values: Mapping[str, float], *, step: int) -> None:
        """As `add`, without what an earlier event file shows at this step already."""
        if self._purge_step is not None and step < self._purge_step:
            shown = self._shown_at(step)
            values = {name: value for name, value in values.items() if name not in shown}
        self.add(values, step=step)

    def _shown_at(self, step: int) -> set[str]:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        files = sorted(self._folder.glob("events.out.tfevents.*"))
        events = (event for path in files for event in EventFileLoader(str(path)).Load())
        return {value.tag for event in events if event.step == step for value in event.summary.value}

    def close(self) -> None:
        """Safe to call twice."""
        if self._stream is not None:
            self._stream.close()

    def _write(self, event: Any) -> None:
        if self._stream is None:
            self._stream = self._open()
        append_whole(self._stream, _record(event))

    def _open(self) -> IO[bytes]:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._folder.mkdir(parents=True, exist_ok=True)
        # readers take files in the order of their names
        name = f"events.out.tfevents.{time.time_ns() // 1000:020d}.{socket.gethostname()}.{os.getpid()}"
        header = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if self._purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            header.append(Event(wall_time=time.time(), step=self._purge_step, session_log=start))
        stream = (self._folder / name).open("ab", buffering=0)
        append_whole(stream, b"".join(map(_record, header)))
        return stream


def _histogram(name: str, values: Sequence[float]) -> Any:
    """Equal buckets between the smallest and the largest value; one bucket where these are the same."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    low, high = min(values), max(values)
    number = _BUCKETS if high > low else 1
    width = (high - low) / number or 1.0
    counts = [0] * number
    for value in values:
        counts[min(number - 1, int((value - low) / width))] += 1
    histogram = HistogramProto(
        min=low,
        max=high,
        num=len(values),
        sum=sum(values),
        sum_squares=sum(value * value for value in values),
        bucket_limit=[low + width * (index + 1) for index in range(number)],
        bucket=counts,
    )
    return Summary.Value(tag=name, histo=histogram)


def _text(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    # it is read as Markdown, in which an indented block is shown as it stands
    block = "\n".join(f"    {line}" for line in text.splitlines())
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(
        dtype=DT_STRING, tensor_shape=shape, string_val=[block.encode("utf-8", errors="backslashreplace")]
    )
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _record(event: Any) -> bytes:
    """TFRecord framing: length, its checksum, the message, its checksum."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    parts: list[bytes] = []
    RecordWriter(_Parts(parts)).write(event.SerializeToString())
    return b"".join(parts)


class _Parts:
    """What a RecordWriter writes to."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def write(self, data: bytes) -> None:
        self._parts.append(data)
