"""`algo.options` of an algorithm that is named as RLlib names it: judged before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from inspect import signature
from typing import Any

from tiltyard.config.rllib_algos import Named
from tiltyard.engines.rllib.algorithm_config import CONFIGS, configured, rllibs_name
from tiltyard.engines.rllib.worker_spec import WorkerSpec
from tiltyard.errors import Problem, did_you_mean
from tiltyard.plugins.resolve import short

LENGTH = "rollout_fragment_length"  # RLlib's name of what is algo.rollout here
OURS = {
    **dict.fromkeys(("model", "policy_model_config", "q_model_config", "hiddens"), "the net is `model`'s"),
    **dict.fromkeys(("learner_class", "learner_connector", "learner_config_dict"), "the learner is ours"),
    **dict.fromkeys(("num_atoms", "noisy", "sigma0", "v_min", "v_max"), "the net puts out one number for each choice"),
    "add_default_connectors_to_learner_pipeline": "the learner is ours",
    "twin_q": "there are always two critics",
    "burn_in_len": "single steps are replayed",
    "store_buffer_in_checkpoints": "it always is",
}


def option_problems(task: WorkerSpec) -> Iterator[Problem]:
    """Options that RLlib does not take, that are decided here, or that do not go with the other settings."""
    algo = task.experiment.algo
    assert isinstance(algo, Named)
    config, wrong = CONFIGS[rllibs_name(algo)](), False
    known = {name for kind in type(config).__mro__ for name in _keywords(vars(kind).get("training"))} - OURS.keys()
    for name, value in algo.options.items():
        setting = f"algo.options.{name}"
        if name not in known:
            wrong = True
            why = f"cannot be set: {OURS[name]}" if name in OURS else f"is no option of {algo.id}"
            yield Problem(setting, short(value), why, "leave it out" if name in OURS else did_you_mean(name, known))
    if not wrong:
        logging.disable(logging.WARNING)  # RLlib says which of its two ways of working it takes
        try:
            config = configured(task)
            config.validate()
        except (ValueError, TypeError, AssertionError) as error:
            said = " ".join(str(error).partition("To suppress")[0].split())
            said = said.replace(LENGTH, "algo.rollout").replace("to 'auto' OR ", "")
            yield Problem("algo.options", short(algo.options), f"RLlib refuses them: {said}", "see RLlib's own pages")
        finally:
            logging.disable(logging.NOTSET)
        if isinstance(getattr(config, "n_step", 1), tuple | list):
            yield Problem("algo.options.n_step", short(config.n_step), "must be one number", "set it to 1 or more")


def _keywords(method: Any) -> list[str]:
    if method is None:
        return []
    return [each.name for each in signature(method).parameters.values() if each.kind == each.KEYWORD_ONLY]
