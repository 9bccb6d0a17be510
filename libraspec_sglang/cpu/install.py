"""Apply the CPU runtime's patches in this process. Called by the plugin's entry point.

SGLang runs plugins in its launcher, scheduler and detokenizer alike and swallows what they raise,
so every step is logged and a failure is reported at ERROR level before it is raised.
"""

from __future__ import annotations

import logging

from libraspec_sglang.cpu import enable

logger = logging.getLogger(__name__)


def active() -> bool:
    """Whether ``install`` has something to do here."""
    return enable.active()


def install() -> list[str]:
    """Apply every CPU patch; returns their names. A no-op where the runtime is not active."""
    if not active():
        return []
    from libraspec_sglang import patches

    try:
        applied = patches.apply_all(patches.CPU)
    except Exception:
        logger.exception("libraspec: the CPU runtime could not be installed")
        raise
    logger.info("libraspec: CPU runtime active (%s)", ", ".join(applied))
    return applied
