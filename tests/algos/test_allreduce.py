"""A group of learners gives the same result as a single learner, for all minibatch sizes, and fails as a group.

Each learner is a thread here but a process in training; both connect over loopback.
"""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.algos.test_ppo import act_out
from tests.models.specs import CATEGORICAL, CONTINUOUS, env
from tiltyard.algos.allreduce import LearnerGroup, ProcessGroup, SingleProcess
from tiltyard.algos.ppo import Ppo
from tiltyard.config.algos import A2c
from tiltyard.config.algos import Ppo as Settings
from tiltyard.config.schedules import KlAdaptive
from tiltyard.config.sections import Memory, Model, Normalise
from tiltyard.errors import DivergedError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import ActionPart, EnvSpec, Rollout

CPU = torch.device("cpu")
LSTM = Model(hidden=[16], memory=Memory(kind="lstm", size=8, bptt=4))
SMALL: dict[str, Any] = {"rollout": 12, "minibatch": 20, "epochs": 3}


def all_at_once(folder: Path, size: int, work: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Return what `work` returns or raises for each learner of a group, in the order of ranks."""
    found: list[Any] = [None] * size
    groups: list[ProcessGroup] = []  # kept to the end: a learner that leaves closes connections others still make

    def one(rank: int) -> None:
        try:
            group = ProcessGroup(folder, rank, size, CPU)
            groups.append(group)
            found[rank] = work(group)
        except Exception as error:  # noqa: BLE001 - checked by the test
            found[rank] = error

    threads = [threading.Thread(target=one, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a learner hangs"
    return found


class Learning:
    """A learner and its rollouts: its own, or those of another learner."""

    def __init__(
        self, spec: EnvSpec, model: Model, algo: Any, valid: float = 1.0, rollouts: list[Rollout] | None = None
    ) -> None:
        bptt = model.memory.bptt
        self.net = PolicyNet(spec, model, (), seed=0)
        self.rollouts = rollouts or [act_out(self.net, spec, algo.rollout, bptt, seed, valid) for seed in range(3)]
        self.ppo = Ppo(algo, self.net, bptt, 10_000, seed=0)

    def learn(self, group: LearnerGroup) -> tuple[dict[str, Any], list[dict[str, float]], list[Any]]:
        """Update once per rollout. Return the weights, the metrics, and the state of random streams and settings."""
        ppo = self.ppo
        ppo.group = group
        metrics = [ppo.update(rollout, at * rollout.reward.size) for at, rollout in enumerate(self.rollouts)]
        return self.net.arrays(), metrics, [ppo.shuffling.bit_generator.state, ppo.adam.steps, ppo.current_settings()]


def together(folder: Path, learners: list[Learning]) -> list[Any]:
    """Return what each learner returns or raises."""
    return all_at_once(folder, len(learners), lambda group: learners[group.rank].learn(group))


CASES: dict[str, tuple[ActionPart, Model, Any, float]] = {
    "plain": (CATEGORICAL, Model(hidden=[16]), Settings(**SMALL), 1.0),
    "memory": (CATEGORICAL, LSTM, Settings(**SMALL), 1.0),
    "memory, and rows without a decision": (CATEGORICAL, LSTM, Settings(**SMALL), 0.6),
    "hardly anybody decides": (CATEGORICAL, LSTM, Settings(**SMALL), 0.1),
    "fewer chunks than learners": (CATEGORICAL, LSTM, Settings(**{**SMALL, "minibatch": 8}), 1.0),
    "numbers": (
        CONTINUOUS,
        Model(hidden=[16], normalise=Normalise(obs=True, returns=True)),
        Settings(**{**SMALL, "minibatch": 17}, value_clip=0.2, entropy=0.01),
        0.8,
    ),
    "importance ratios": (CATEGORICAL, LSTM, Settings(**SMALL, advantage="vtrace", normalise_advantage=False), 0.9),
    "a limit of divergence": (CATEGORICAL, LSTM, Settings(**SMALL, lr=1e-2, kl_stop=1e-4), 1.0),
    "adapting to divergence": (
        CATEGORICAL,
        LSTM,
        Settings(**SMALL, lr=KlAdaptive(kind="kl_adaptive", start=1e-3, target=1e-4), kl=0.1),
        0.9,
    ),
    "a2c": (CATEGORICAL, LSTM, A2c(id="a2c", rollout=12), 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_group_of_learners_matches_a_single_learner(tmp_path: Path, name: str) -> None:
    action, model, algo, valid = CASES[name]
    size = 3 if "learners" in name or "decision" in name else 2
    alone = Learning(env(action), model, algo, valid)
    others = [Learning(env(action), model, algo, rollouts=alone.rollouts) for _ in range(size)]
    start = alone.net.arrays()
    weights, metrics, place = alone.learn(SingleProcess())
    members = together(tmp_path, others)
    assert any(not np.array_equal(start[key], array) for key, array in weights.items())
    for theirs, output, end in members:
        for key, array in weights.items():
            np.testing.assert_allclose(theirs[key], array, rtol=1e-4, atol=1e-6, err_msg=key)
        for one, other in zip(metrics, output, strict=True):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-5, nan_ok=True)
        assert repr(end) == repr(place), "the same shuffling, gradient steps and settings"
    first = members[0]
    for other in members[1:]:
        assert all(first[0][key].tobytes() == array.tobytes() for key, array in other[0].items()), "to the bit"
        assert repr(first[1:]) == repr(other[1:])
    if name == "a limit of divergence":
        assert any(each["learn/epochs"] < algo.epochs for each in metrics), "the limit has an effect"
    if name == "adapting to divergence":
        assert place[2]["lr"] != 1e-3, "the schedule has moved"


def test_non_finite_loss_fails_all_learners_and_reports_the_whole_minibatch(tmp_path: Path) -> None:
    learners = [Learning(env(), LSTM, Settings(**{**SMALL, "minibatch": 48})) for _ in range(2)]
    for learner in learners:
        learner.rollouts[0].log_prob[0, 0] = -1e30  # only in the share of one learner
    found = together(tmp_path, learners)
    for error in found:
        assert isinstance(error, DivergedError) and "is not a finite number" in error.message
        assert np.shape(error.batch["action"])[:2] == (4, 12)


def test_shares_are_disjoint_and_complete(tmp_path: Path) -> None:
    def shares(group: ProcessGroup) -> list[list[int]]:
        return [list(range(count)[group.share(count)]) for count in (0, 1, 2, 7, 64)]

    found = all_at_once(tmp_path, 3, shares)
    for at, count in enumerate((0, 1, 2, 7, 64)):
        mine = [each[at] for each in found]
        assert [*mine[0], *mine[1], *mine[2]] == list(range(count))
        assert max(map(len, mine)) == math.ceil(count / 3)
