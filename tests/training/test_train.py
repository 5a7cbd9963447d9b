"""The run: exact resume, configuration, cache and store."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.tiny import LAYER_IDS, VOCAB, tiny_model, write_store
from training.batches import SamplerState, next_sequences, split_sequences
from training.config import TrainConfig, TrainConfigError, parse_overrides, read_config
from training.features import CacheError, CacheSpec, FeatureCache
from training.store import SequenceMeta, StoreError, StoreWriter, read_store, store_paths
from training.target import Target
from training.train import RunState, TrainError, choose_draft_vocab, learning_rate, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    tiny_model().save_pretrained(root / "target")
    write_store(root / "data")
    return root


def config_of(folder: Path, **changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "name": "tiny",
        "target": str(folder / "target"),
        "data": str(folder / "data"),
        "target_layer_ids": LAYER_IDS,
        "block_size": 4,
        "draft_vocab_size": 32,
        "mask_token_id": 3,
        "markov_rank": 4,
        "validation_fraction": 0.2,
        "anchor_fraction": 0.4,
        "steps": 12,
        "warmup_steps": 3,
        "log_every_steps": 1,
        "top_k": 40,
    }
    return TrainConfig(**(values | changes))  # type: ignore[arg-type]


def weights_of(work_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(work_dir / "checkpoint.pt", weights_only=True)["drafter"]


def test_resume_is_exact(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps at once and in two sittings end in the same bits."""
    config = config_of(folder)
    train(config, tmp_path / "whole", show_progress=False)

    import training.train as module

    class StopHereError(Exception):
        pass

    plain_step = module.Trainer.step

    def step(self: module.Trainer) -> object:
        if self.state.step == 5:
            self.save()
            raise StopHereError
        return plain_step(self)

    monkeypatch.setattr(module.Trainer, "step", step)
    with pytest.raises(StopHereError):
        train(config, tmp_path / "parts", show_progress=False)
    monkeypatch.setattr(module.Trainer, "step", plain_step)
    with pytest.raises(TrainError, match="--resume"):
        train(config, tmp_path / "parts", show_progress=False)
    train(config, tmp_path / "parts", resume=True, show_progress=False)

    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
    with (tmp_path / "parts" / "log.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 13))
    assert (tmp_path / "parts" / "curves.png").stat().st_size > 1000
    for name in ("best", "last"):
        assert (tmp_path / "parts" / name / "model.safetensors").is_file()


def test_cycle_ends_and_the_start_are_averaged(folder: Path, tmp_path: Path) -> None:
    """The mean of a trained start and of where each of three cycles ended, also after a stop."""
    start = train(config_of(folder), tmp_path / "start", show_progress=False)
    config = config_of(folder, init=str(start), cycles=3)
    seen = []

    import training.train as module

    class Watched(module.Trainer):
        def add_to_average(self) -> None:
            seen.append({k: v.clone() for k, v in self.drafter.state_dict().items()})
            super().add_to_average()
            self.save()
            if len(seen) == 2 and not resumed:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Trainer", Watched)
        resumed = False
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", show_progress=False)
        resumed = True
        train(config, tmp_path / "run", resume=True, show_progress=False)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["state"]["averaged"] == len(seen) == 4
    for name, mean in saved["average"].items():
        torch.testing.assert_close(mean, torch.stack([one[name] for one in seen]).mean(dim=0))
    assert not torch.equal(seen[1]["fc.weight"], seen[3]["fc.weight"])
    with (tmp_path / "run" / "validation.csv").open(newline="") as file:
        rows = [(int(row["step"]), int(row["averaged"])) for row in csv.DictReader(file)]
    assert rows == [(0, 1), (4, 1), (8, 1), (8, 3), (12, 1), (12, 4)]
    # The average is checked with its own weights, and the drafter goes on with its own.
    for name, own in saved["drafter"].items():
        assert torch.equal(own, seen[3][name])


def test_resume_refuses_another_run(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, steps=1)
    train(config, tmp_path, show_progress=False)
    with pytest.raises(TrainError, match="learning_rate"):
        train(config_of(folder, steps=2, learning_rate=0.1), tmp_path, resume=True)
    with pytest.raises(TrainError, match="nothing to resume"):
        train(config, tmp_path / "empty", resume=True)


def test_training_learns(folder: Path, tmp_path: Path) -> None:
    """Sixty steps on twelve texts must beat the first steps clearly."""
    config = config_of(folder, steps=60, learning_rate=1e-2, anchor_fraction=1.0)
    train(config, tmp_path, show_progress=False)
    with (tmp_path / "log.csv").open(newline="") as file:
        losses = [float(row["l1"]) for row in csv.DictReader(file)]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_learning_rate_warms_up_and_decays(folder: Path) -> None:
    config = config_of(folder, steps=100, warmup_steps=10)
    assert learning_rate(config, 0, 0.0) == pytest.approx(config.learning_rate / 10)
    assert learning_rate(config, 10, 0.0) == pytest.approx(config.learning_rate)
    assert learning_rate(config, 99, 1.0) == pytest.approx(
        config.learning_rate * config.final_lr_fraction
    )
    cycles = config_of(folder, steps=100, warmup_steps=10, cycles=4)
    for progress in (0.25, 0.5, 0.75):
        assert learning_rate(cycles, 50, progress) == pytest.approx(cycles.learning_rate)
        assert learning_rate(cycles, 50, progress - 1e-9) == pytest.approx(
            cycles.learning_rate * cycles.final_lr_fraction
        )
    timed = config_of(folder, steps=0, minutes=2.0)
    from training.train import progress_of

    assert progress_of(timed, RunState(step=7, elapsed_s=60.0)) == pytest.approx(0.5)


def test_config_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    start = 'name = "x"\ntarget = "t"\ndata = "d"\ntarget_layer_ids = [1]\nminutes = 5\n'
    path.write_text(start)
    assert read_config(path).minutes == 5.0
    assert read_config(path, parse_overrides(["steps=7", "init=some/where"])).steps == 7
    for extra, word in (
        ("blok_size = 3", "unknown keys blok_size"),
        ("block_size = 0", "block_size must be 1..64, got 0"),
        ('block_size = "3"', "block_size must be a int"),
        ("steps = 4", "exactly one of steps"),
        ("target_layer_ids = [", "not valid TOML"),
    ):
        path.write_text(start + extra)
        with pytest.raises(TrainConfigError, match=word):
            read_config(path)


def test_shipped_config_is_valid() -> None:
    path = Path(__file__).parents[2] / "training" / "configs" / "dspark_smollm2_135m.toml"
    assert read_config(path).block_size == 5


def test_sampler_visits_all_once_an_epoch_and_continues() -> None:
    state, pool = SamplerState(), list(range(10, 21))
    first = next_sequences(state, 7, pool, seed=3)
    copy = SamplerState(state.epoch, state.cursor, list(state.order))
    second = next_sequences(state, 7, pool, seed=3)
    assert second == next_sequences(copy, 7, pool, seed=3)
    assert sorted(first + second[:4]) == pool
    train_part, held_out = split_sequences(100, 0.1, seed=0)
    assert len(held_out) == 10
    assert not set(train_part) & set(held_out)


def test_store_survives_a_crash_of_the_writer(tmp_path: Path) -> None:
    stem = tmp_path / "s"
    meta = SequenceMeta(3, 1, 0.0, False, True)
    with StoreWriter(stem) as writer:
        writer.append([5, 6, 7], meta)
    token_path, meta_path = store_paths(stem)
    with token_path.open("ab") as file:
        file.write(b"\x01\x00\x02")  # tokens whose line was never written
    with meta_path.open("a") as file:
        file.write('{"n": 2, "a"')
    assert len(read_store(stem)) == 1
    with StoreWriter(stem) as writer:
        assert writer.num_tokens == 3
        writer.append([8, 9, 10], meta)
        with pytest.raises(StoreError, match="65535"):
            writer.append([1, 2, 70000], meta)
    store = read_store(stem)
    assert store.sequence(1).tolist() == [8, 9, 10]
    token_path.write_bytes(b"\x01\x00")
    with pytest.raises(StoreError, match="holds 1 tokens"):
        read_store(stem)


def test_cache_holds_what_the_target_says(folder: Path, tmp_path: Path) -> None:
    store = read_store(folder / "data")
    target = Target.load(folder / "target", LAYER_IDS)
    spec = CacheSpec(len(store), store.num_tokens, 32, LAYER_IDS, VOCAB, 8)
    cache = FeatureCache(tmp_path, store, spec)
    with pytest.raises(CacheError, match="not in the cache"):
        cache.read(3)
    cache.fill(target, [3])
    assert cache.ready().tolist() == [i == 3 for i in range(len(store))]
    sequence = cache.read(3)
    ids = torch.from_numpy(store.sequence(3))
    with torch.inference_mode():
        out = target.model(input_ids=ids[None], output_hidden_states=True)
    features = torch.cat([out.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)
    np.testing.assert_allclose(sequence.features, features, atol=1e-2, rtol=1e-2)
    row = sequence.answer_start - 1
    best = out.logits[0, row].log_softmax(dim=-1).topk(8)
    assert sequence.top_ids[row].tolist() == best.indices.tolist()
    np.testing.assert_allclose(sequence.top_logprobs[row], best.values, atol=1e-2)
    with pytest.raises(CacheError, match="top_k differ"):
        FeatureCache(tmp_path, store, CacheSpec(len(store), store.num_tokens, 32, LAYER_IDS, 48, 9))


def test_draft_vocab_has_frequent_answer_tokens_and_eos(folder: Path) -> None:
    store = read_store(folder / "data")
    ids = choose_draft_vocab(store, 10, VOCAB, keep=[2])
    assert 2 in ids.tolist()
    assert ids.tolist() == sorted(set(ids.tolist()))
    counts = np.zeros(VOCAB, dtype=int)
    for index, meta in enumerate(store.metas):
        np.add.at(counts, store.sequence(index)[meta.a :], 1)
    left_out = [i for i in range(VOCAB) if i not in ids.tolist()]
    kept = [i for i in ids.tolist() if i != 2]
    assert counts[kept].min() >= counts[left_out].max()
