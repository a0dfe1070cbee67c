"""A checking process that starts well and dies on every request."""

import os
import sys

from megatron_rl.rewards.worker import read_frame, write_frame

write_frame(sys.stdout.buffer, {"ready": os.getpid()})
read_frame(sys.stdin.buffer)
os._exit(7)
