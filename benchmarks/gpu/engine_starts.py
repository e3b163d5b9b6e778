"""An engine of the tiny pair with honed attached starts and answers: every other part with an engine needs that.

It comes first, so that an incomplete build of vLLM costs half a minute and not the whole time. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kept import Kept
from benchmarks.server.processes import ROOT

PROMPT, NUM_TOKENS = "A server", 16


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    kept = Kept(parser.parse_args().out)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="honed-starts-") as folder:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            HF_HUB_OFFLINE="1",
            HONED_RUNTIME_DIR=folder,
        )
        import vllm

        kept.update(vllm=vllm.__version__, seconds_to_import=round(time.monotonic() - began_s, 1))
        llm = started()
        core = llm.llm_engine.engine_core.engine_core
        hello = core.scheduler._honed._hello()
        kept.update(seconds_to_start=round(time.monotonic() - began_s, 1), runner=hello.runner, capabilities=hello.capabilities)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        kept.update(tokens=len(output.outputs[0].token_ids), limits=hello.limits)
        llm.llm_engine.engine_core.shutdown()
    is_ok = kept.document["tokens"] == NUM_TOKENS and "swap" in hello.capabilities
    kept.update(ok=is_ok)
    print(json.dumps(kept.document), flush=True)
    return 0 if is_ok else 1


def started() -> Any:
    """Start the engine, in float32 and without CUDA graphs."""
    from vllm import LLM

    from honed.attach.engine import engine_hook

    engine_hook.install()
    tiny = ROOT / "benchmarks" / "tiny"
    on_cuda: dict[str, Any] = {
        "attention_backend": "TRITON_ATTN",
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.05,
    }
    return LLM(
        str(tiny / "target"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        scheduler_cls="honed.attach.scheduler.make_scheduler",
        worker_extension_cls="honed.attach.worker.HonedWorkerExtension",
        speculative_config={"method": "dflash", "model": str(tiny / "drafter"), "num_speculative_tokens": 7},
        **(on_cuda if torch.cuda.is_available() else {}),
    )


if __name__ == "__main__":
    sys.exit(main())
