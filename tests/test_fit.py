"""The training loop: against torch's own, in a stack and alone, and resumed at every step."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import run
from torch import Tensor, nn

from fedtools.client.client import Client
from fedtools.client.objective import Objective
from fedtools.client.trainer import Trainer, clip, finite
from fedtools.client.unit import Unit
from fedtools.exchange.messages import MAX_LOSS
from fedtools.exchange.private import Private, make_private
from fedtools.models.training import Training

WIDTH, HIDDEN, CLASSES, BATCH = 6, 5, 3, 4
RAGGED = [9, 9, 7, 4, 1]
OPTIMIZERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"lr": 0.02},
    "adamw": {"lr": 0.02, "weight_decay": 0.1},
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread, since the order of sums depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """K networks of two layers, with a scalar and a counter each; inputs may have fewer clients."""

    def __init__(self, clients: int, kind: torch.dtype = torch.float32, dropout: float = 0.0):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        shapes = {"first": (WIDTH, HIDDEN), "bias": (HIDDEN,), "head": (HIDDEN, CLASSES)}
        for name, shape in shapes.items():
            value = torch.randn(clients, *shape, generator=draw, dtype=torch.float64) / 2
            setattr(self, name, nn.Parameter(value.to(kind)))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, clients, dtype=kind))
        self.register_buffer("seen", torch.zeros(clients, dtype=torch.int64))
        self.register_buffer("none", torch.zeros(clients, 0))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        k = len(x)
        if self.training:
            self.seen[:k] += 1
        hidden = (torch.bmm(x, self.first[:k]) + self.bias[:k, None]).tanh()
        hidden = F.dropout(hidden, self.dropout, self.training) * self.gain[:k, None, None]
        return torch.bmm(hidden, self.head[:k])


class Alone(nn.Module):
    """One client's network, its tensors without the leading dimension."""

    def __init__(self, stack: Net, client: int):
        super().__init__()
        for name, value in stack.named_parameters():
            setattr(self, name, nn.Parameter(value[client].detach().clone()))
        self.dropout = stack.dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x[0] @ self.first + self.bias).tanh()
        hidden = F.dropout(hidden, self.dropout, self.training) * self.gain
        return (hidden @ self.head)[None]


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    amount: int = 1
    frames: int = BATCH


class Batches:
    """A batch for each client and step, a function of both; the same again after `period` steps."""

    def __init__(
        self,
        steps: Sequence[int],
        kind: torch.dtype = torch.float32,
        clients: Sequence[int] | None = None,
        period: int = 1000,
        parts: int = 1,
        scale: Mapping[int, float] | None = None,
    ):
        self.steps, self.kind, self.period, self.parts = list(steps), kind, period, parts
        self.clients, self.scale = clients or range(len(self.steps)), scale or {}

    def one(self, client: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([client, step % self.period, part])
        x = random.standard_normal((BATCH, WIDTH)) * self.scale.get(client, 1.0)
        return torch.from_numpy(x).to(self.kind), torch.from_numpy(
            random.integers(CLASSES, size=BATCH)
        )

    def stream(self, first: int) -> Iterator[list[Batch]]:
        for step in range(first, self.steps[0]):
            active = [c for c, count in zip(self.clients, self.steps, strict=True) if count > step]
            parts = []
            for part in range(self.parts):
                pairs = [self.one(client, step, part) for client in active]
                parts.append(Batch(*map(torch.stack, zip(*pairs, strict=True))))
            yield parts


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return each client's mean cross-entropy, (K,)."""
    return F.cross_entropy(model(batch.x).transpose(1, 2), batch.y, reduction="none").mean(1)


def train(model, batches, options, objective=None, stacked=True, **more):
    trainer = Trainer(model, objective or Objective(entropy), options, alone(), stacked=stacked)
    return trainer.train(batches, **more), trainer


def alone(seed: int = 0, number: int = 1, name: str = "a", home: Private | None = None) -> Unit:
    """Return a unit whose directory keeps checkpoints."""
    return Unit([name], number, seed, home, [home] if home else [])


def options(optim="sgd", **more) -> Training:
    return Training(optim=optim, optim_conf=OPTIMIZERS[optim], **more)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Check equality bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# --- computations


def bare_loop(model: Alone, batches: Batches, client: int, steps: int, training: Training) -> float:
    """Train straightforwardly by torch's optimisers that are not fused; return the mean loss."""
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer = classes[training.optim](model.parameters(), foreach=False, **training.optim_conf)
    losses = []
    for step in range(steps):
        parts = [batches.one(client, step, part) for part in range(batches.parts)]
        each = [F.cross_entropy(model(x[None])[0], y) for x, y in parts]
        losses += [loss.item() for loss in each]
        optimizer.zero_grad()
        (sum(each) / len(each)).backward()
        if training.grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        warmup = training.warmup_steps
        if training.scheduler:
            rate = warmup**0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)
            optimizer.param_groups[0]["lr"] = training.optim_conf["lr"] * rate
        optimizer.step()
    return sum(losses) / max(len(losses), 1)


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"grad_clip": 0.2},
        {"scheduler": "warmuplr", "scheduler_conf": {"warmup_steps": 5}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
@pytest.mark.parametrize("steps", [RAGGED, [5, 3, 0, 0], [3]], ids=str)
def test_a_stack_is_its_models_one_after_the_other(optim, more, steps):
    """In double precision they agree to 1e-10, including models that finished or never start."""
    training = options(optim, **more)
    batches = Batches(steps, torch.float64, parts=1 if len(steps) != 4 else 2)
    stack = Net(len(steps), torch.float64)
    alone = [Alone(stack, client) for client in range(len(steps))]
    before = copy_of(stack)
    found, _ = train(stack, batches, training)
    moved = 0.0
    for client, (count, model) in enumerate(zip(steps, alone, strict=True)):
        loss = bare_loop(model, batches, client, count, training)
        assert found[client][0] == count and found[client][2] == ""
        assert found[client][1] == pytest.approx(loss, abs=1e-12)
        for name, value in model.named_parameters():
            ours = stack.state_dict()[name][client]
            assert (ours - value).abs().max() < 1e-10, name
            moved = max(moved, (ours - before[name][client]).abs().max().item())
        assert stack.seen[client] == count * batches.parts
    assert moved > 0.01


def losses_of(seed: int, key: tuple, model: nn.Module) -> list[float]:
    """Return losses of three steps over the same batch at rate 0: only dropout changes them."""
    training = Training(optim="sgd", optim_conf={"lr": 0.0})
    found = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses = entropy(model, batch)
        found.append(losses.sum().item())
        return losses

    trainer = Trainer(model, Objective(loss), training, alone(seed, *key), stacked=True)
    trainer.train(Batches([3, 3], period=1))
    return found


def test_dropout_is_drawn_anew_for_every_step_key_and_seed():
    keys = [(0, (1, "a")), (0, (2, "a")), (0, (1, "b")), (1, (1, "a"))]
    found = [losses_of(seed, key, Net(2, dropout=0.5)) for seed, key in keys]
    assert len({loss for losses in found for loss in losses}) == 12
    assert losses_of(*keys[0], Net(2, dropout=0.5)) == found[0]
    # An earlier evaluation has left the model in evaluation mode.
    assert losses_of(*keys[0], Net(2, dropout=0.5).eval()) == found[0]


def test_one_model_that_is_no_stack():
    stack = Net(3, torch.float64)
    batches = Batches([6], torch.float64, clients=[1])
    training = options("adamw", grad_clip=0.2)
    ours, theirs = Alone(stack, 1), Alone(stack, 1)
    ((steps, loss, reason),), _ = train(ours, batches, training, stacked=False)
    expected = bare_loop(theirs, batches, 1, 6, training)
    assert (steps, reason) == (6, "") and loss == pytest.approx(expected, abs=1e-12)
    for name, value in theirs.state_dict().items():
        assert (ours.state_dict()[name] - value).abs().max() < 1e-10


def test_stacks_are_sorted_by_their_steps():
    from fedtools.tasks.kws.stacks import ClipBatches

    with pytest.raises(ValueError, match="not sorted"):
        ClipBatches(None, ["a", "b"], [slice(0, 1)] * 2, [1, 2], None, (0, 1, "train"))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_each_model_of_a_stack_is_clipped_as_torch_clips(kind):
    random = torch.Generator().manual_seed(3)
    # A norm far below the limit, near it, far over it, huge, and none.
    scales = torch.tensor([1e-3, 0.11, 5.0, 1e12, 0.0], dtype=kind)
    stack = Net(5, kind)
    for value in stack.parameters():
        noise = torch.randn(value.shape, generator=random, dtype=kind)
        value.grad = noise * scales.view(-1, *[1] * (value.ndim - 1))
    stack.bias.grad = None
    alone = [Alone(stack, client) for client in range(5)]
    for client, model in enumerate(alone):
        for name, value in model.named_parameters():
            grad = dict(stack.named_parameters())[name].grad
            value.grad = None if grad is None else grad[client].clone()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clip(stack, 1.0, stacked=True)
    assert stack.bias.grad is None
    for client, model in enumerate(alone):
        for name, value in model.named_parameters():
            if name != "bias":
                ours = dict(stack.named_parameters())[name].grad[client]
                torch.testing.assert_close(ours, value.grad, rtol=1e-5, atol=1e-30)
    # One model alone is clipped by torch itself.
    (one,) = alone[2:3]
    expected = {
        name: value.grad.clone() for name, value in one.named_parameters() if name != "bias"
    }
    nn.utils.clip_grad_norm_(one.parameters(), 0.3)
    after = {name: value.grad.clone() for name, value in one.named_parameters() if name != "bias"}
    for name, value in one.named_parameters():
        value.grad = expected.get(name)
    clip(one, 0.3, stacked=False)
    for name, value in after.items():
        assert torch.equal(dict(one.named_parameters())[name].grad, value)


def test_the_rate_warms_up_over_rounds():
    """ESPnet's schedule counts the steps of earlier rounds."""
    training = options("adam", scheduler="warmuplr", scheduler_conf={"warmup_steps": 6})
    rates = []

    class Watch(Objective):
        def after_step(self, model: nn.Module, active: int) -> None:
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    model = Net(2)
    for first in (0, 5):
        trainer = Trainer(model, Watch(entropy), training, alone(), stacked=True)
        trainer.before = first
        trainer.train(Batches([5, 5]))
    expected = [0.02 * math.sqrt(6) * min(s**-0.5, s * 6**-1.5) for s in range(1, 11)]
    assert rates == pytest.approx(expected)
    assert max(rates) == rates[5] == pytest.approx(0.02)


def test_bfloat16_trains_near_float32():
    seen, found, models = set(), {}, {}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch.x)
        seen.add(logits.dtype)
        return F.cross_entropy(logits.transpose(1, 2), batch.y, reduction="none").mean(1)

    for kind in ("float32", "bfloat16"):
        models[kind] = Net(3)
        batches = Batches([60, 60, 40], period=4)
        training = options("sgd", train_dtype=kind)
        found[kind], _ = train(models[kind], batches, training, Objective(loss))
        assert all(reason == "" for _, _, reason in found[kind])
        with torch.no_grad():
            first, last = (
                entropy(model.eval(), next(batches.stream(0))[0])
                for model in (Net(3), models[kind])
            )
        assert (last < first / 2).all()
    assert seen == {torch.float32, torch.bfloat16}
    assert {value.dtype for value in models["bfloat16"].parameters()} == {torch.float32}
    low, full = ([loss for _, loss, _ in found[kind]] for kind in ("bfloat16", "float32"))
    assert low == pytest.approx(full, rel=0.05) and low != full


# --- invalid values


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_its_models_alone(bad):
    stack = Net(4)
    assert finite(stack, True) == [True] * 4 and finite(stack, False) == [True]
    for name, value in stack.state_dict().items():
        if not value.is_floating_point() or not value.numel():
            continue
        for client in range(4):
            for place in (0, -1):
                flat = value.data.view(4, -1)
                good = flat[client, place].item()
                flat[client, place] = bad
                assert finite(stack, True) == [index != client for index in range(4)], name
                assert finite(stack, False) == [False]
                flat[client, place] = good
    # Infinities that cancel are still found; large values are as bad as infinite ones.
    stack.first.data[1, 0, :2] = torch.tensor([math.inf, -math.inf])
    stack.head.data[2] = 3e38
    assert finite(stack, True) == [True, False, False, True]
    single = Alone(Net(4), 2)
    assert finite(single, False) == [True]
    single.gain.data.fill_(bad)
    assert finite(single, False) == [False]


def test_a_model_that_diverges_leaves_the_others_of_its_stack():
    training = options("sgd", grad_clip=1.0)
    ordinary, poisoned = Net(4), Net(4)
    expected, _ = train(ordinary, Batches(RAGGED[:4]), training)
    found, _ = train(poisoned, Batches(RAGGED[:4], scale={1: math.inf}), training)
    assert found[1][2].startswith("diverged: loss nan") and "parameters not finite" in found[1][2]
    for client in (0, 2, 3):
        assert found[client] == expected[client]
        for name, value in ordinary.state_dict().items():
            assert torch.equal(value[client], poisoned.state_dict()[name][client])


@pytest.mark.parametrize("loss", [1e308, -1e308, 2 * MAX_LOSS, math.nan, math.inf])
def test_a_loss_that_is_no_loss(loss):
    def strange(model: nn.Module, batch: Batch) -> Tensor:
        found = entropy(model, batch).double()
        return found + torch.tensor([0.0, loss, 0.0], dtype=torch.float64)[: len(found)]

    (one, two, three), _ = train(Net(3), Batches([2, 2, 1]), options(), Objective(strange))
    assert one[2] == three[2] == "" and two[2].startswith("diverged: loss ")


# --- resuming


class Teacher(Objective):
    """A teacher: the student learns from labels and its own running mean, as (K, ...) tensors."""

    def __init__(self, model: nn.Module, stacked: bool):
        super().__init__(self.both)
        self.stacked = stacked
        self.teacher = {name: value.clone() for name, value in copy_of(model).items()}

    def both(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch.x)
        with torch.no_grad():
            wanted = torch.func.functional_call(model.eval(), self.teacher, (batch.x,))
            model.train()
        right = F.cross_entropy(logits.transpose(1, 2), batch.y, reduction="none").mean(1)
        return right + (logits - wanted).square().mean((1, 2))

    def after_step(self, model: nn.Module, active: int) -> None:
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                rows = slice(active) if self.stacked else ...
                self.teacher[name][rows] = 0.9 * self.teacher[name][rows] + 0.1 * value[rows]

    def state(self) -> dict[str, Tensor]:
        return {f"teacher.{name}": value for name, value in self.teacher.items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        for name, value in self.teacher.items():
            value.copy_(torch.as_tensor(state[f"teacher.{name}"]))


class Killed(BaseException):
    """The end of a killed process."""


def make(stacked: bool) -> tuple[nn.Module, Batches]:
    """Make a model with dropout, and batches of two parts."""
    stack = Net(len(RAGGED), dropout=0.3)
    if stacked:
        return stack, Batches(RAGGED, parts=2)
    return Alone(stack, 1), Batches([9], clients=[1], parts=2)


def begin(
    stacked: bool, training: Training, home: Private | None = None
) -> tuple[Trainer, Batches]:
    model, batches = make(stacked)
    unit, teacher = alone(3, 2, "au", home), Teacher(model, stacked)
    trainer = Trainer(model, teacher, training, unit, stacked=stacked)
    trainer.before = 1
    return trainer, batches


@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stack"])
@pytest.mark.parametrize("optim", ["sgd", "adamw"])
@pytest.mark.parametrize("interval", [1, 3])
def test_what_was_interrupted_after_any_step_ends_the_same(tmp_path, stacked, optim, interval):
    training = options(
        optim,
        save_interval_steps=interval,
        grad_clip=0.5,
        scheduler="warmuplr",
        scheduler_conf={"warmup_steps": 4},
    )
    whole, batches = begin(stacked, training)
    expected = whole.train(batches)
    assert not torch.equal(whole.objective.teacher["first"], whole.model.first)
    for killed in range(1, 10):
        home, taken = Private(tmp_path / str(killed), 2), []
        trainer, batches = begin(stacked, training, home)
        trainer.objective.after_step = kill_after(trainer, killed)
        with pytest.raises(Killed):
            trainer.train(batches)
        trainer, batches = begin(stacked, training, home)
        trainer.objective.after_step = count_steps(trainer, taken)
        assert trainer.train(batches) == expected
        # The state of the step in which it was killed was not saved yet.
        assert len(taken) == 9 - (killed - 1) // interval * interval
        assert_same(copy_of(trainer.model), copy_of(whole.model))
        assert_same(trainer.objective.teacher, whole.objective.teacher)


def kill_after(trainer: Trainer, step: int) -> Callable[[nn.Module, int], None]:
    """Return an `after_step` that raises after a given step."""
    plain = trainer.objective.after_step

    def after_step(model: nn.Module, active: int) -> None:
        plain(model, active)
        if trainer.steps == step - 1:
            raise Killed

    return after_step


def count_steps(trainer: Trainer, taken: list[int]) -> Callable[[nn.Module, int], None]:
    """Return an `after_step` that counts its calls."""
    plain = trainer.objective.after_step

    def after_step(model: nn.Module, active: int) -> None:
        plain(model, active)
        taken.append(active)

    return after_step


@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stack"])
def test_every_saved_state_is_enough(tmp_path, stacked):
    """This includes the state after the last step, when only results are assembled."""
    training, kept = options("adamw", save_interval_steps=1), []

    class Home(Private):
        def save_checkpoint(self, tensors):
            super().save_checkpoint(tensors)
            kept.append(self.checkpoint.read_bytes())

    whole, batches = begin(stacked, training, Home(tmp_path / "whole", 2))
    expected = whole.train(batches)
    assert len(kept) == 9
    for number, state in enumerate(kept, 1):
        home, taken = Private(make_private(tmp_path / str(number)), 2), []
        home.checkpoint.write_bytes(state)
        trainer, batches = begin(stacked, training, home)
        trainer.objective.after_step = count_steps(trainer, taken)
        assert trainer.train(batches) == expected
        assert len(taken) == 9 - number
        assert_same(copy_of(trainer.model), copy_of(whole.model))
        assert_same(trainer.objective.teacher, whole.objective.teacher)


def test_teachers_of_a_stack_are_those_of_its_models_alone():
    """Momentum and weight decay move a finished model, but not its teacher."""
    training = options("sgd")
    stack = Net(len(RAGGED), torch.float64)
    teacher = Teacher(stack, True)
    singles = [Alone(stack, client) for client in range(len(RAGGED))]
    train(stack, Batches(RAGGED, torch.float64), training, teacher)
    for client, (model, count) in enumerate(zip(singles, RAGGED, strict=True)):
        own = Teacher(model, False)
        batches = Batches([count], torch.float64, clients=[client])
        train(model, batches, training, own, stacked=False)
        for name, value in own.teacher.items():
            assert (teacher.teacher[name][client] - value).abs().max() < 1e-10
            assert (stack.state_dict()[name][client] - model.state_dict()[name]).abs().max() < 1e-10


# --- clients: states in files


class FiveSteps:
    """One client's data, whose epoch consists of the same five steps each time."""

    sizes, facts = [20], {}

    def batches(self, epochs, steps, purpose):
        return Batches([5 * (epochs or 1)], clients=[1], period=5)


class Models:
    """Models without a stack dimension."""

    stacked = False

    def __init__(self, training: Training):
        self.training = training

    def objective(self, model, source):
        return Objective(entropy)


def client(folder, number: int, model: nn.Module, training: Training) -> Client:
    unit = alone(0, number, "au", Private(folder, number))
    return Client(unit, FiveSteps(), Models(training), model)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_rounds_that_keep_the_optimiser_are_one_training(tmp_path, optim):
    """Four rounds of one epoch, one of them repeated, equal four epochs bit for bit."""
    training = options(
        optim, scheduler="warmuplr", scheduler_conf={"warmup_steps": 7}, grad_clip=0.5
    )
    once, rounds, anew = (Alone(Net(2), 1) for _ in range(3))
    (whole,) = client(tmp_path / "once", 1, once, training).train(epochs=4, keep_optimizer=True)
    assert (whole.steps, whole.utterances) == (20, 20)
    for number in (1, 2, 3, 4):
        before = copy_of(rounds)
        for _ in range(2 if number == 3 else 1):
            rounds.load_state_dict(before)
            at = client(tmp_path / "rounds", number, rounds, training)
            (fitted,) = at.train(epochs=1, keep_optimizer=True)
            Private(tmp_path / "rounds", number).finish()
        assert (fitted.steps, fitted.reason) == (5, "")
        client(tmp_path / "anew", number, anew, training).train(epochs=1)
    assert_same(copy_of(rounds), copy_of(once))
    assert not torch.equal(anew.first, once.first)
    names = {path.name for path in (tmp_path / "rounds").iterdir()}
    assert names == {"round_0003", "round_0004"}
    assert not list((tmp_path / "anew").glob("*"))


def test_a_client_that_is_killed_goes_on_from_its_checkpoint(tmp_path):
    training = options("adamw", save_interval_steps=3)
    whole = Alone(Net(2, dropout=0.3), 1)
    teacher = Teacher(whole, False)
    expected = client(tmp_path / "whole", 3, whole, training).train(teacher, epochs=2)
    for killed in (1, 3, 4, 6, 10):
        folder = tmp_path / str(killed)
        for last in (killed, None):
            model = Alone(Net(2, dropout=0.3), 1)
            own, steps = Teacher(model, False), []
            plain = own.after_step

            def after_step(model, active, plain=plain, steps=steps, last=last):
                plain(model, active)
                steps.append(active)
                if len(steps) == last:
                    raise Killed

            own.after_step = after_step
            at = client(folder, 3, model, training)
            if last:
                with pytest.raises(Killed):
                    at.train(own, epochs=2)
            else:
                assert at.train(own, epochs=2) == expected
        assert len(steps) == 10 - (killed - 1) // 3 * 3
        assert_same(copy_of(model), copy_of(whole))
        assert_same(own.teacher, teacher.teacher)
        # Until the job's files exist, a rerun finds the final state, and takes no step.
        again = Alone(Net(2, dropout=0.3), 1)
        steps.clear()
        assert client(folder, 3, again, training).train(own, epochs=2) == expected
        assert steps == []
        assert_same(copy_of(again), copy_of(whole))
        Private(folder, 3).finish()
        assert not list(folder.rglob("*checkpoint*"))


@pytest.mark.parametrize(("number", "purpose"), [(2, "train"), (1, "private"), (2, "private")])
def test_checkpoints_of_another_round_or_purpose_do_not_count(tmp_path, number, purpose):
    training = options("sgd", save_interval_steps=1)
    expected, found, taken = Alone(Net(2), 0), Alone(Net(2), 0), Alone(Net(2), 0)
    client(tmp_path / "own", number, expected, training).train(epochs=1, purpose=purpose)
    other = Alone(Net(2), 1)
    client(tmp_path / "other", 1, other, training).train(epochs=1)
    assert (tmp_path / "other" / "checkpoint.safetensors").exists()
    # The same round and purpose have nothing left to do, whatever the model's state.
    client(tmp_path / "other", 1, taken, training).train(epochs=1)
    assert_same(copy_of(taken), copy_of(other))
    client(tmp_path / "other", number, found, training).train(epochs=1, purpose=purpose)
    assert_same(copy_of(found), copy_of(expected))


def test_only_some_parameters(tmp_path):
    model = Alone(Net(2), 1)
    before = copy_of(model)
    at = client(tmp_path, 1, model, options("adamw"))
    at.train(only=lambda name: name in ("head", "bias"))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == (name not in ("head", "bias"))
        assert value.requires_grad
    at.train()
    assert not torch.equal(model.first, before["first"])


UNCOMPILED = """
import sys, torch
from fedtools.models.training import OPTIMIZERS, Training, make_optimizer

def trained(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    optimizer = make(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 7)).square().sum().backward()
        optimizer.step()
    return torch.cat([value.flatten() for value in model.parameters()])

options = {name: {"lr": 0.01, "weight_decay": 0.1} for name in OPTIMIZERS}
found = {
    name: trained(lambda model: make_optimizer(model, Training(optim=name, optim_conf=given)))
    for name, given in options.items()
}
assert "torch._dynamo" not in sys.modules
for name, given in options.items():
    torchs = trained(lambda model: OPTIMIZERS[name](model.parameters(), fused=True, **given))
    assert torch.equal(found[name], torchs), name
"""


def test_optimisers_are_torchs_without_its_compiler():
    """They compute the same bits, and do not import what takes longer than a small experiment."""
    # A fork would have imported it.
    run(sys.executable, "-c", UNCOMPILED, cold=True).ok()


FREED = """
import resource
from fedtools.tasks.kws.memory import keep_freed_memory

keep_freed_memory()
for _ in range(2):
    bytearray(100 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc it does nothing")
def test_freed_memory_is_used_again():
    """The system clears no page a second time."""
    first, second = run(sys.executable, "-c", FREED, cold=True).ok().out.split()
    assert int(second) - int(first) < 100
