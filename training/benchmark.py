"""How good a drafter is on prompt sets it was not trained on, and how honest its confidence is.

The target answers each prompt once, greedily and at temperature 1, and its features are cached;
any number of drafters is then judged without the target (``training.evaluate`` says why that equals
a real decoding loop). Outcomes at temperature 1: with a text y drawn from p, accepting y with
probability ``min(1, q(y) / p(y))`` has exactly the joint law of (accepted, token) under rejection
sampling, so one coin per position gives outcomes to hold the confidence against.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.data import ChatFormat
from training.drafter import Drafter, target_to_draft
from training.evaluate import SequenceScore, Validation, score_sequence, summarise
from training.features import CachedSequence, CacheSpec, FeatureCache
from training.generate import GenerationEngine, GenerationRequest
from training.scores import auc, expected_calibration_error
from training.store import SequenceMeta, StoreWriter, read_store, store_paths
from training.target import Target


@dataclass
class ConfidenceReport:
    """Quality of the confidence head at one temperature; lists run over positions k = 1..g.

    ``survival_auc``: of the product c_1..c_k as a score for "all up to k accepted";
    ``conditional_auc`` and ``conditional_ece``: of c_k among rounds in which all before k were
    accepted. ECE over ten equal bins of c. NaN where only one outcome occurred.

    ``best_survival_auc``: of the true probability of "all up to k accepted" given the tokens before
    k, which no confidence can exceed: at temperature 1 the rest is chance.
    """

    survival_auc: list[float] = field(default_factory=list)
    best_survival_auc: list[float] = field(default_factory=list)
    conditional_auc: list[float] = field(default_factory=list)
    conditional_ece: list[float] = field(default_factory=list)
    mean_confidence: list[float] = field(default_factory=list)
    mean_acceptance: list[float] = field(default_factory=list)


@dataclass
class SetReport:
    """Result on one prompt set."""

    prompts: int
    greedy: Validation
    sampled: Validation
    greedy_confidence: ConfidenceReport
    sampled_confidence: ConfidenceReport


def answer_prompts(
    prompts: Sequence[str],
    temperature: float,
    max_tokens: int,
    stem: Path,
    chat: ChatFormat,
    engine: GenerationEngine,
) -> None:
    """Write the target's answers to the store ``stem``, in the order of ``prompts``; once."""
    if store_paths(stem)[1].is_file():
        return
    requests = [
        GenerationRequest(chat.prompt(prompt), temperature, seed, max_tokens)
        for seed, prompt in enumerate(prompts)
    ]
    answers = dict(engine.generate(requests))
    scratch = stem.with_name("." + stem.name)
    for path in store_paths(scratch):
        path.unlink(missing_ok=True)
    with StoreWriter(scratch) as writer:
        for number, request in enumerate(requests):
            output = answers[number]
            ids = request.prompt_ids + tuple(output)
            meta = SequenceMeta(
                n=len(ids),
                a=len(request.prompt_ids),
                t=temperature,
                mag=False,
                done=output[-1] in engine.eos_token_ids,
                job=number,
            )
            writer.append(ids, meta)
    # The meta file last: its presence is what says that the answers are complete.
    for source, destination in zip(store_paths(scratch), store_paths(stem), strict=True):
        source.replace(destination)


def cached_answers(stem: Path, target: Target, top_k: int = 512) -> list[CachedSequence]:
    """All sequences of the store ``stem``, with the target run where its cache is not complete."""
    store = read_store(stem)
    spec = CacheSpec(
        num_sequences=len(store),
        num_tokens=store.num_tokens,
        feature_size=len(target.layer_ids) * target.hidden_size,
        layer_ids=target.layer_ids,
        vocab_size=target.vocab_size,
        top_k=min(top_k, target.vocab_size),
    )
    cache = FeatureCache(stem.with_name(stem.name + ".cache"), store, spec)
    cache.fill(target, range(len(store)))
    return [cache.read(index) for index in range(len(store))]


def outcomes(
    score: SequenceScore, generator: np.random.Generator
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Confidences, acceptances and true survivals [A', g] where the whole block exists."""
    whole = score.exists.all(axis=1)
    confidences, matches = score.confidences[whole], score.matches[whole]
    if score.temperature == 0:
        return confidences, matches, np.cumprod(matches, axis=1, dtype=np.float32)
    ratios = score.ratios[whole]
    before = np.cumprod(np.insert(ratios[:, :-1], 0, 1, axis=1), axis=1)
    return confidences, generator.random(ratios.shape) < ratios, before * score.overlaps[whole]


def confidence_report(
    confidences: npt.NDArray[np.float32],
    accepted: npt.NDArray[np.bool_],
    true_survival: npt.NDArray[np.float32],
) -> ConfidenceReport:
    """Judge confidences [A, g] by what was accepted [A, g] (each position by itself)."""
    report = ConfidenceReport()
    reached = np.ones(len(accepted), dtype=bool)
    survival = np.cumprod(confidences, axis=1)
    for k in range(accepted.shape[1]):
        alive = reached & accepted[:, k]
        report.survival_auc.append(auc(survival[:, k], alive))
        report.best_survival_auc.append(auc(true_survival[:, k], alive))
        c, hit = confidences[reached, k], accepted[reached, k]
        report.conditional_auc.append(auc(c, hit))
        report.conditional_ece.append(expected_calibration_error(c, hit))
        report.mean_confidence.append(float(c.mean()) if len(c) else float("nan"))
        report.mean_acceptance.append(float(hit.mean()) if len(c) else float("nan"))
        reached = alive
    return report


def judge(
    drafter: Drafter, greedy: Sequence[CachedSequence], sampled: Sequence[CachedSequence]
) -> SetReport:
    """Accepted lengths and confidence of ``drafter`` on one set's answers."""
    to_draft = target_to_draft(drafter.draft_to_target, drafter.config.vocab_size)
    summaries, reports = [], []
    for sequences in (greedy, sampled):
        generator = np.random.default_rng(0)
        attempts = [score_sequence(drafter, sequence, to_draft) for sequence in sequences]
        scores = [score for score in attempts if score is not None]
        summaries.append(summarise(scores))
        report = ConfidenceReport()
        if drafter.confidence_head is not None and scores:
            results = zip(*(outcomes(score, generator) for score in scores), strict=True)
            report = confidence_report(*map(np.concatenate, results))
        reports.append(report)
    return SetReport(len(greedy), summaries[0], summaries[1], reports[0], reports[1])
