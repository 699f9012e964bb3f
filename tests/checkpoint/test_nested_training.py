"""States of optimizers and schedulers, and training that goes on from them."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from nestings import assert_same
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, RMSprop, lr_scheduler

import hf_stream

OPTIMIZERS = {
    "adamw": partial(AdamW, lr=1e-2),
    "adamw-foreach": partial(AdamW, lr=1e-2, foreach=True),
    "adamw-fused": partial(AdamW, lr=1e-2, fused=True),
    "adamw-tensor-lr": partial(AdamW, lr=torch.tensor(1e-2)),
    "amsgrad": partial(Adam, lr=1e-2, amsgrad=True),
    "sgd-momentum": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": partial(SGD, lr=1e-2),
    "adafactor": partial(Adafactor, lr=1e-2),
    "rmsprop": partial(RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "lbfgs": partial(torch.optim.LBFGS, lr=1e-2, max_iter=3),
}


def sequential(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 5)], [2])


SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    "sequential": sequential,
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    "cosine-restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
}


class Run:
    """A small training, all of whose state can be saved."""

    def __init__(self, optimizer, scheduler) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 1).double()
        self.model = nn.Sequential(*layers)
        self.model[4].requires_grad_(False)
        groups = [{"params": self.model[0].parameters()}, {"params": [*self.model[3].parameters()], "lr": 5e-3}]
        lbfgs = optimizer.func is torch.optim.LBFGS
        self.optimizer = optimizer([p for group in groups for p in group["params"]] if lbfgs else groups)
        self.scheduler = scheduler(self.optimizer)

    def steps(self, count: int) -> None:
        for _ in range(count):
            inputs = torch.randn(6, 4)

            def loss(inputs=inputs):
                self.optimizer.zero_grad()
                value = self.model[:4](inputs).square().mean()
                value.backward()
                return value

            value = self.optimizer.step(loss)
            plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([value.item()] if plateau else []))

    def state(self) -> dict[str, object]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        }

    def load(self, state) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"][0])
        random.setstate(state["rng"][1])
        np.random.set_state(state["rng"][2])


CASES = [(name, "lambda") for name in OPTIMIZERS] + [("sgd-momentum", name) for name in SCHEDULERS]


@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path, optimizer: str, scheduler: str) -> None:
    make = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    straight = Run(*make)
    straight.steps(3)
    hf_stream.save_nested(straight.state(), tmp_path / "state.safetensors")
    saved = copy.deepcopy(straight.state())
    assert_same(hf_stream.load_nested(tmp_path / "state.safetensors"), saved)
    straight.steps(3)

    resumed = Run(*make)
    resumed.load(hf_stream.load_nested(tmp_path / "state.safetensors"))
    assert_same(resumed.state(), saved)
    resumed.steps(3)
    assert_same(resumed.state(), straight.state())


def test_the_state_of_a_grad_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    hf_stream.save_nested(scaler.state_dict(), tmp_path / "scaler.safetensors")
    assert_same(hf_stream.load_nested(tmp_path / "scaler.safetensors"), scaler.state_dict())


def test_the_states_of_random_generators(tmp_path: Path) -> None:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(0).bit_generator.state,
        "cpu": torch.random.get_rng_state(),
        "cuda": [torch.random.get_rng_state()],
    }
    hf_stream.save_nested(states, tmp_path / "rng.safetensors")
    assert_same(hf_stream.load_nested(tmp_path / "rng.safetensors"), states)
