"""What each metric means and its unit; docs/reference/metrics.md is generated from this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric(
        "train/return", "reward", "Mean return of the last 100 training episodes, before reward scaling and clipping."
    ),
    Metric("train/return_min", "reward", "Smallest return among the last 100 training episodes."),
    Metric("train/return_max", "reward", "Largest return among the last 100 training episodes."),
    Metric("train/length", "env steps", "Mean length of the last 100 training episodes."),
    Metric("eval/return", "reward", "Mean return of an evaluation on its fixed seeds."),
    Metric("eval/return_low", "reward", "Lower end of the 95 % interval of eval/return."),
    Metric("eval/return_high", "reward", "Upper end of the 95 % interval of eval/return."),
    Metric("eval/length", "env steps", "Mean episode length of an evaluation."),
    Metric("eval/seconds", "seconds", "Time the evaluation took."),
    Metric("loss/policy", "", "Policy loss, mean over the minibatches of the update's last epoch."),
    Metric("loss/value", "", "Value loss in normalised units, mean over the minibatches of the last epoch."),
    Metric("loss/entropy", "nats", "Entropy of the policy, mean over the minibatches of the last epoch."),
    Metric(
        "loss/kl",
        "nats",
        "Approximate KL divergence from the policy that collected the samples, over the minibatches of the last epoch, "
        "each before its gradient step: 0 with a single gradient step.",
    ),
    Metric(
        "loss/clone",
        "nats",
        "With algo.id = clone: negative log likelihood of the recorded actions, mean over the minibatches of the "
        "update, each before its gradient step. Below 0 is possible with continuous actions.",
    ),
    Metric(
        "loss/validation",
        "nats",
        "With algo.id = clone: the same on recorded steps that are never learned from (algo.validation).",
    ),
    Metric(
        "learn/accuracy",
        "0 to 1",
        "With algo.id = clone: share of steps whose most likely action is the recorded one; only discrete parts of "
        "actions are compared.",
    ),
    Metric("learn/validation_accuracy", "0 to 1", "The same on recorded steps that are never learned from."),
    Metric("learn/passes", "passes", "With algo.id = clone: passes over the dataset, counted by episodes begun."),
    Metric("learn/clip_fraction", "0 to 1", "Share of samples whose probability ratio was clipped."),
    Metric(
        "learn/explained_variance",
        "up to 1",
        "Fraction of the returns' variance that the value function explains; 0 is none.",
    ),
    Metric("learn/gradient_norm", "", "Norm of the gradient before clipping, mean over the last epoch."),
    Metric(
        "learn/epochs",
        "epochs",
        "Passes over the batch in the update; fewer than algo.epochs if algo.kl_stop ended it.",
    ),
    Metric("setting/lr", "", "Current learning rate."),
    Metric("setting/clip", "", "Current clip range of the probability ratio; 1e15 if nothing is clipped (a2c)."),
    Metric("setting/entropy", "", "Current weight of the entropy bonus."),
    Metric("setting/kl", "", "Current weight of the KL penalty."),
    Metric(
        "speed/env_steps_per_second", "env steps / s", "Env steps since the last record over the wall time they took."
    ),
    Metric(
        "speed/frames_per_second", "frames / s", "Simulator frames since the last record over the wall time they took."
    ),
    Metric("time/env", "0 to 1", "Share of the wall time since the last record spent in envs."),
    Metric("time/inference", "0 to 1", "Share of the wall time since the last record spent choosing actions."),
    Metric(
        "time/read",
        "0 to 1",
        "With algo.id = clone: share of the wall time since the last record spent reading recorded episodes.",
    ),
    Metric("time/learn", "0 to 1", "Share of the wall time since the last record spent in updates."),
    Metric("time/wait", "0 to 1", "Share of the wall time since the last record spent waiting for workers."),
    Metric("time/transfer", "0 to 1", "Share of the wall time since the last record spent copying samples."),
    Metric("time/save", "0 to 1", "Share of the wall time since the last record spent waiting for checkpoints."),
    Metric("time/eval", "0 to 1", "Share of the wall time since the last record spent in evaluations."),
    Metric("time/other", "0 to 1", "Share of the wall time since the last record spent on everything else."),
    Metric("workers/env", "0 to 1", "Share of the workers' time spent in envs."),
    Metric("workers/inference", "0 to 1", "Share of the workers' time spent choosing actions."),
    Metric("workers/wait", "0 to 1", "Share of the workers' time spent waiting for the learner."),
    Metric("workers/other", "0 to 1", "Share of the workers' time spent on everything else."),
    Metric("workers/restarts", "workers", "Workers that died or hung and were replaced, in this attempt."),
    Metric("actor/rows", "rows", "Mean rows per inference batch; only with engine.inference = batched."),
    Metric("lag/mean", "updates", "Mean age of the weights that sampled this batch; only in async mode."),
    Metric("lag/max", "updates", "Age of the oldest weights that sampled this batch."),
    Metric("lag/<updates>", "0 to 1", "Share of the batch sampled with weights of this age."),
    Metric("lag/discarded", "env steps", "Discarded in this attempt because they were older than engine.max_lag."),
    Metric(
        "policy/<name>/return",
        "reward",
        "With several policies: mean return of this policy's agents in its last 100 training episodes.",
    ),
    Metric(
        "policy/<name>/env_steps", "env steps", "With several policies: env steps that this policy has learned from."
    ),
    Metric(
        "policy/<name>/<metric>",
        "its own",
        "With several policies: this policy's loss/..., learn/... and setting/..., and episode/... of episodes that it "
        "played alone.",
    ),
    Metric(
        "episode/<name>",
        "the env's own",
        "Mean over the last 100 training episodes of the value that the env reported at their ends.",
    ),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


def describe(name: str) -> Metric | None:
    """The meaning of a metric, or None for an unknown name."""
    if name.startswith("episode/"):
        name = "episode/<name>"
    elif name.startswith("policy/"):
        _, _, own = name.removeprefix("policy/").partition("/")
        learned = own.startswith(("loss/", "learn/", "setting/")) and own in _BY_NAME
        if own in ("return", "env_steps"):
            name = f"policy/<name>/{own}"
        elif learned or own.startswith("episode/"):
            name = "policy/<name>/<metric>"
    elif name.startswith("lag/") and name[4:].isdecimal():
        name = "lag/<updates>"
    return _BY_NAME.get(name)


def reference_page() -> str:
    """The table of all metrics as Markdown."""
    rows = [f"| `{metric.name}` | {metric.unit or '–'} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(["| metric | unit | meaning |", "| --- | --- | --- |", *rows]) + "\n"
