"""Run one real SGLang engine on CPU and print what it generated, as one JSON line.

A process of its own per engine: SGLang keeps global state, and the environment alone must suffice.
Called as ``python cpu_engine.py JOB``, JOB being JSON: {"server": {...}, "batches": [[prompt]],
"tokens": n}.
"""

from __future__ import annotations

import json
import sys


def main(job: dict) -> dict:
    import sglang

    engine = sglang.Engine(log_level="error", max_total_tokens=8192, **job["server"])
    sampling = {"temperature": 0, "max_new_tokens": job["tokens"], "ignore_eos": True}
    try:
        replies = [engine.generate(batch, sampling) for batch in job["batches"]]
        info = engine.get_server_info()
    finally:
        engine.shutdown()
    return {
        "tokens": [[r["output_ids"] for r in batch] for batch in replies],
        "accept": [[r["meta_info"].get("spec_accept_length") for r in batch] for batch in replies],
        "cached": [[r["meta_info"]["cached_tokens"] for r in batch] for batch in replies],
        "calls": info["internal_states"][0].get("libraspec_cpu_calls"),
        "device": info["device"],
        "attention_backend": info["attention_backend"],
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
