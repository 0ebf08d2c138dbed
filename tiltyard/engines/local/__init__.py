"""The local engine: processes of one machine. Here are the functions that they run, as the fork server imports them."""

from __future__ import annotations

WORKER = "tiltyard.engines.local.worker:work"
INFERENCE_SERVER = "tiltyard.engines.local.inference:work"
LEARNER = "tiltyard.engines.local.learner_worker:work"
PRELOAD = tuple(role.partition(":")[0] for role in (WORKER, INFERENCE_SERVER, LEARNER))
