"""Checks `algo.options` of the algorithms rllib:NAME before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from inspect import signature
from typing import Any

from tiltyard.config.rllib_algos import Named
from tiltyard.engines.rllib.algorithm_config import CONFIGS, make_config, rllib_name
from tiltyard.engines.rllib.worker_spec import WorkerSpec
from tiltyard.errors import Problem, did_you_mean
from tiltyard.plugins.resolve import short

ROLLOUT_OPTION = "rollout_fragment_length"  # RLlib's name of algo.rollout
NOT_SETTABLE = {
    **dict.fromkeys(("model", "policy_model_config", "q_model_config", "hiddens"), "the network is set by `model`"),
    **dict.fromkeys(("learner_class", "learner_connector", "learner_config_dict"), "Tiltyard has its own learner"),
    **dict.fromkeys(("num_atoms", "noisy", "sigma0", "v_min", "v_max"), "the network has one output per action"),
    "add_default_connectors_to_learner_pipeline": "Tiltyard has its own learner",
    "twin_q": "there are always two critics",
    "burn_in_len": "single steps are replayed",
    "store_buffer_in_checkpoints": "checkpoints always include the buffer",
}


def option_problems(worker_spec: WorkerSpec) -> Iterator[Problem]:
    """Options that RLlib does not know, that Tiltyard sets itself, or that contradict other settings."""
    algo = worker_spec.experiment.algo
    assert isinstance(algo, Named)
    config, wrong = CONFIGS[rllib_name(algo)](), False
    known = {
        name for kind in type(config).__mro__ for name in _keywords(vars(kind).get("training"))
    } - NOT_SETTABLE.keys()
    for name, value in algo.options.items():
        setting = f"algo.options.{name}"
        if name not in known:
            wrong = True
            why = f"cannot be set: {NOT_SETTABLE[name]}" if name in NOT_SETTABLE else f"is not an option of {algo.id}"
            yield Problem(
                setting, short(value), why, "remove it" if name in NOT_SETTABLE else did_you_mean(name, known)
            )
    if not wrong:
        logging.disable(logging.WARNING)  # RLlib logs which API stack it uses
        try:
            config = make_config(worker_spec)
            config.validate()
        except (ValueError, TypeError, AssertionError) as error:
            reason = " ".join(str(error).partition("To suppress")[0].split())
            reason = reason.replace(ROLLOUT_OPTION, "algo.rollout").replace("to 'auto' OR ", "")
            yield Problem(
                "algo.options", short(algo.options), f"RLlib refuses them: {reason}", "see RLlib's documentation"
            )
        finally:
            logging.disable(logging.NOTSET)
        if isinstance(getattr(config, "n_step", 1), tuple | list):
            yield Problem("algo.options.n_step", short(config.n_step), "must be one number", "set it to 1 or more")


def _keywords(method: Any) -> list[str]:
    if method is None:
        return []
    return [each.name for each in signature(method).parameters.values() if each.kind == each.KEYWORD_ONLY]
