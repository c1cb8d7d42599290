"""Environment that must be set before Hugging Face code or torch is imported. Import this module first.

Offline: a node never asks the network for a model. OpenMP: the processes of one host share its cores, so a waiting thread of
one of them must sleep and not spin (a spinning team of two slowed small matrix products 100-fold with a busy neighbour).
Huge pages: a killed process's sockets close only after its memory is freed, page by page, and how soon its streams go on hangs on
that (`prefill_node/engine/LOG.md`); so tensors of 2 MiB and more lie in huge pages where the system gives them.
Compiler cache: torch makes its folder on import, though nothing is compiled here; one that exists already leaves none behind.
"""

from __future__ import annotations

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
