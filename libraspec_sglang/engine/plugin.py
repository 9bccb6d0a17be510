"""Entry point: SGLang calls :func:`load` in its launcher, scheduler and detokenizer processes.

SGLang logs and swallows whatever a plugin raises here, so a contract that does not hold registers
an algorithm whose validation raises the reason; SGLang without LIBRASPEC goes on working.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def load() -> None:
    """Register LIBRASPEC, its flags and, on a machine without a GPU, the CPU runtime.

    Only the version is compared here. The rest of the contract needs SGLang's workers imported,
    which the processes that never run them should not pay for, so it is compared when a server
    asks for LIBRASPEC.
    """
    from libraspec_sglang.cpu import install

    from . import contract

    if install.active():
        install.install()
    problem = contract.version_problem()
    if problem:
        _register_refusal(contract.explain([problem]))
        return
    try:
        _register()
    except Exception as error:
        logger.exception("libraspec: registration failed")
        _register_refusal(contract.explain([f"registration failed ({error})"]))


def _register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from libraspec_sglang import patches

    from . import algorithm, hooks

    @SpeculativeAlgorithm.register(
        algorithm.NAME,
        supports_overlap=True,
        validate_server_args=algorithm.validate,
        spec_class=algorithm.LibraSpecAlgorithm,
    )
    def _worker(server_args):
        from .worker import LibraSpecWorker

        return LibraSpecWorker

    for target, hook, kind in hooks.HOOKS:
        HookRegistry.register(target, hook, HookType[kind])
    patches.apply_all(patches.EVERYWHERE)


def _register_refusal(reason: str) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def refuse(server_args) -> None:
        raise ValueError(reason)

    SpeculativeAlgorithm.register("LIBRASPEC", supports_overlap=True, validate_server_args=refuse)(
        lambda server_args: None
    )
    logger.error("%s", reason)
