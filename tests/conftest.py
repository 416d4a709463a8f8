"""One torch thread per test process: two processes with one thread each are the fast shape on two cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
