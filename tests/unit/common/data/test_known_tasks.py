"""Known data sets: every form in which their files are handed out is read; what is absent is named with the cure."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedstill.common.config import ConfigError, DataConfig, SiteTask, TaskConfig
from fedstill.common.config.files import check, load_run
from fedstill.common.data.site_tasks import Item, Work, read_items
from fedstill.common.data.splits import make_splits
from fedstill.common.data.tasks import KNOWN, SITE_SETS, TASKS, TaskError, load_task, source_of
from fedstill.common.data.tasks.task import INFERENCE_TRIANGLE, VALENCE_AROUSAL

SHARED = Path(__file__).resolve().parents[5] / "shared/data"
SHARED = SHARED if SHARED.is_dir() else Path("/work/shared/data")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


def read(folder: Path, name: str, **more: object) -> list[tuple[object, str]]:
    """(text, label's name) of the training texts."""
    task, pools = load_task(TaskConfig.model_validate({"name": name, "folder": folder, **more}))
    assert pools.train.labels is not None
    return [(text, task.labels[label]) for text, label in zip(pools.train.texts, pools.train.labels, strict=True)]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


FORMS: dict[str, tuple[str, str, str, list[tuple[object, str]]]] = {  # task, file, its content, what is in it
    "cola": ("cola", "CoLA/train.tsv", 'gj04\t1\t\tI "sing.\ngj04\t0\t*\tSing I.\n',
             [('I "sing.', "acceptable"), ("Sing I.", "unacceptable")]),
    "sst2": ("sst2", "SST-2/train.tsv", "sentence\tlabel\nfine \t1\nbad \t0\n",
             [("fine ", "positive"), ("bad ", "negative")]),
    "mrpc, GLUE's own": (
        "mrpc", "MRPC/train.tsv",
        'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"He said " no "\tNo , he said\n',
        [(('"He said " no "', "No , he said"), "same")]),
    "mrpc, quoted": (
        "mrpc", "MRPC/train.tsv", 'index\tlabel\tsentence1\tsentence2\n0\t0\t"He said "" no """\tNo , he said\n',
        [(('He said " no "', "No , he said"), "different")]),
    "qqp": ("qqp", "QQP/train.tsv",
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta?\tb?\t1\n1\t2\tcut\n",
            [(("a?", "b?"), "same")]),
    "qqp, json": ("qqp", "QQP_subset/train.json", json.dumps({"0": {"text_a": "a?", "text_b": "b?", "label": "0"}}),
                  [(("a?", "b?"), "different")]),
    "mnli": (
        "mnli", "MNLI/train.tsv", "index\tgenre\tsentence1\tsentence2\tgold_label\n0\tfiction\ta\tb\tneutral\n",
        [(("a", "b"), "neutral")]),
    "mnli, jsonl": ("mnli", "multinli_1.0/multinli_1.0_train.jsonl",
                    lines({"gold_label": "contradiction", "genre": "travel", "sentence1": "a", "sentence2": "b"}),
                    [(("a", "b"), "contradiction")]),
    "qnli": ("qnli", "QNLI/train.tsv", "index\tquestion\tsentence\tlabel\n0\twho?\tme\tentailment\n",
             [(("who?", "me"), "entailment")]),
    "rte": ("rte", "RTE/train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n",
            [(("a", "b"), "not_entailment")]),
    "wnli, no heading": ("wnli", "WNLI/train.tsv", "0\ta\tb\t1\n2\tc\td\t0\n",
                         [(("a", "b"), "entailment"), (("c", "d"), "not_entailment")]),
    "boolq": ("boolq", "BoolQ/train.jsonl", lines({"question": "q", "passage": "p", "label": True}),
              [(("q", "p"), "yes")]),
    "cb": ("cb", "CB/train.jsonl", lines({"premise": "a", "hypothesis": "b", "label": "contradiction"}),
           [(("a", "b"), "contradiction")]),
    "copa": (
        "copa", "COPA/train.jsonl",
        lines({"premise": "It fell.", "choice1": "It flew.", "choice2": "It slid.", "question": "cause", "label": 1}),
        [(("It fell. What was the cause?", "first: It flew. second: It slid."), "second")]),
    "multirc": (
        "multirc", "MultiRC/train.jsonl",
        lines({"passage": {"text": "P", "questions": [{"question": "q?", "answers": [
            {"text": "x", "label": 0}, {"text": "y", "label": 1}]}]}}),
        [(("P", "q? x"), "no"), (("P", "q? y"), "yes")]),
    "record": (
        "record", "ReCoRD/train.jsonl",
        lines({"passage": {"text": "Ann met Bob", "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}]},
               "qas": [{"query": "@placeholder came", "answers": [{"text": "Bob"}]}]}),
        [(("Ann met Bob", "Ann came"), "no"), (("Ann met Bob", "Bob came"), "yes")]),
    "superglue-rte": ("superglue-rte", "superglue/RTE/train.jsonl",
                      lines({"premise": "a", "hypothesis": "b", "label": "entailment"}), [(("a", "b"), "entailment")]),
    "wic": ("wic", "WiC/train.jsonl", lines({"word": "w", "sentence1": "a", "sentence2": "b", "label": False}),
            [(("w: a", "b"), "no")]),
    "wsc": (
        "wsc", "WSC/train.jsonl",
        lines({"text": "Mark lied. He fled.", "label": True,
               "target": {"span1_index": 0, "span1_text": "Mark", "span2_index": 2, "span2_text": "He"}}),
        [(("Mark lied. * He * fled.", "Mark"), "yes")]),
    "snli": (
        "snli", "snli_1.0/snli_1.0_train.jsonl.gz",
        lines({"gold_label": "-", "sentence1": "a", "sentence2": "b"},
              {"gold_label": "neutral", "sentence1": "c", "sentence2": "d"}),
        [(("c", "d"), "neutral")]),
    "anli": ("anli", "anli_v1.0/R2/train.jsonl", lines({"context": "c", "hypothesis": "h", "label": "e"}),
             [(("c", "h"), "entailment")]),
    "paws": ("paws", "paws_qqp/train.tsv", "id\tsentence1\tsentence2\tlabel\n1\tb'it \\xc3\\xa9'\tb\"it 's\"\t1\n",
             [(("it é", "it 's"), "same")]),
    "sst5": ("sst5", "sst5/stsa.fine.train", "4 so good\n0 so bad\n",
             [("so good", "very positive"), ("so bad", "very negative")]),
    "imdb": ("imdb", "aclImdb/train/neg/3_2.txt", "dull", [("dull", "negative")]),
    "imdb, table": ("imdb", "imdb/IMDB Dataset.csv", 'review,sentiment\n"dull, dull",negative\n',
                    [("dull, dull", "negative")]),
    "amazon": ("amazon", "amazon/baby/train.csv", "idx,label,text\n9,2,broke\n8,0,so so\n",
               [("broke", "negative"), ("so so", "neutral")]),
    "amazon-stars": ("amazon-stars", "amazon/reviews_Toys_and_Games_5.json.gz",
                     lines({"reviewText": "ok", "overall": 3.0}, {"reviewText": "ah", "overall": 5.0}),
                     [("ok", "3"), ("ah", "5")]),
    "graded": ("graded", "vader4/tweets_GroundTruth.txt", "1\t2.7\tyes\n2\t-0.5\tmeh\n3\t-0.6\tno\n",
               [("yes", "very positive"), ("meh", "neutral"), ("no", "negative")]),
    "ag_news": ("ag_news", "ag_news_csv/train.csv", '"3","Oil","Up, again"\n"1","Vote","Today"\n',
                [("Oil Up, again", "Business"), ("Vote Today", "World")]),
    "ag_news, tsv": ("ag_news", "ag_news/train.tsv", "a goal\tSports\n", [("a goal", "Sports")]),
    "dailydialog": (
        "dailydialog", "DailyDialog/train_data.json",
        json.dumps([[{"text": "One", "label": "none"}, {"text": "Two", "label": "fear"},
                     {"text": " Three ", "label": "happiness"}], [{"text": "Four", "label": "anger"}]]),
        [("One", "none"), ("Three | Two | One", "happiness"), ("Four", "anger")]),
    "meld": (
        "meld", "MELD/train_sent_emo.csv",
        "Sr No.,Utterance,Speaker,Emotion,Dialogue_ID\n1,Hi,A,neutral,0\n2,Oh!,B,joy,0\n"
        "3,Bye,A,disgust,0\n4,So?,C,surprise,1\n",
        [("Hi", "none"), ("Oh! | Hi", "happiness"), ("So?", "surprise")]),
    "iemocap": (
        "iemocap", "IEMOCAP/train_data.json",
        json.dumps([[{"text": "a", "label": "exc"}, {"text": "b", "label": "fru"}, {"text": "c", "label": "sad"}]]),
        [("a", "happiness"), ("c | b | a", "sadness")]),
}  # fmt: skip


def test_every_known_classification_has_a_form_here() -> None:
    assert {form[0] for form in FORMS.values()} == set(KNOWN) - {"mnli-mm"}


@pytest.mark.parametrize("form", FORMS)
def test_files_as_they_are_handed_out(tmp_path: Path, form: str) -> None:
    name, file, content, wanted = FORMS[form]
    write(tmp_path / file, content)
    assert read(tmp_path, name) == wanted
    assert (read(tmp_path / Path(file).parent, name) if name not in ("amazon", "imdb", "anli") else wanted) == wanted


def test_the_folder_of_all_data_sets_is_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "glue/SST-2/train.tsv", "sentence\tlabel\nfine\t1\n")
    write(tmp_path / "glue/SST-2/dev.tsv", "sentence\tlabel\nbad\t0\n")
    assert source_of("sst2") is None
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    task, pools = load_task(TaskConfig(name="sst2"))
    assert pools.train.texts == ("fine",)
    assert pools.test is not None
    assert pools.test.texts == ("bad",)
    assert "train.tsv" in str(source_of("sst2"))
    assert load_task(TaskConfig(name="sst2", metric="f1"))[0].metric == "f1"
    assert task.metric == "accuracy"


def test_genres_and_domains_come_with_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "MNLI/train.tsv", FORMS["mnli"][2])
    write(tmp_path / "amazon/baby/train.csv", FORMS["amazon"][2])
    write(tmp_path / "amazon/sport/train.csv", FORMS["amazon"][2])
    assert load_task(TaskConfig(name="mnli", folder=tmp_path))[1].train.domains == ("fiction",)
    amazon = load_task(TaskConfig(name="amazon", folder=tmp_path))[1].train.domains
    assert amazon == ("baby", "baby", "sport", "sport")
    write(tmp_path / "amazon/reviews_Toys_and_Games_5.json", lines({"reviewText": "ok", "overall": 3.0}))
    write(tmp_path / "amazon/Reviews.csv", "Id,Score,Text\n1,5,tasty\n")
    stars = load_task(TaskConfig(name="amazon-stars", folder=tmp_path))[1].train
    assert sorted(stars.domains or ()) == ["fine_foods", "toys_and_games"]


@pytest.mark.parametrize(
    ("turns", "text"), [(0, "Three"), (1, "Three | Two"), (2, "Three | Two | One"), (8, "Three | Two | One")]
)
def test_so_many_past_turns_are_read_the_newest_first(tmp_path: Path, turns: int, text: str) -> None:
    write(tmp_path / "train_data.json", FORMS["dailydialog"][2])
    assert read(tmp_path, "dailydialog", turns=turns)[1] == (text, "happiness")


def test_dailydialog_in_two_text_files(tmp_path: Path) -> None:
    write(tmp_path / "train/dialogues_train.txt", "One __eou__ Two __eou__\nThree __eou__\n")
    write(tmp_path / "train/dialogues_emotion_train.txt", "0 4\n6\n")
    assert read(tmp_path, "dailydialog") == [("One", "none"), ("Two | One", "happiness"), ("Three", "surprise")]
    write(tmp_path / "train/dialogues_emotion_train.txt", "0\n6\n")
    with pytest.raises(TaskError, match=r"has other turns than dialogues_train.txt"):
        read(tmp_path, "dailydialog")


def test_data_sets_of_one_kind_together(tmp_path: Path) -> None:
    for form in ("mnli", "snli", "dailydialog", "meld"):
        write(tmp_path / FORMS[form][1], FORMS[form][2])
    with pytest.raises(TaskError, match=r"task anli: its files are not there(.|\n)*task.parts = \['mnli', 'snli'\]"):
        load_task(TaskConfig(name="nli", folder=tmp_path))
    _, nli = load_task(TaskConfig(name="nli", folder=tmp_path, parts=["snli", "mnli"]))
    assert nli.train.domains == ("fiction", "snli")
    assert nli.dropped == {"label left out, train, snli": 1}
    task, talk = load_task(TaskConfig(name="emotions", folder=tmp_path, parts=["dailydialog", "meld"]))
    quarters = {"dailydialog-1": 1, "dailydialog-2": 1, "dailydialog-3": 1}  # the fourth of three texts is empty
    assert Counter(talk.train.domains) == {**quarters, "meld": 3}
    assert dict(zip(task.labels, task.coordinates, strict=True)) == VALENCE_AROUSAL
    with pytest.raises(TaskError, match=r"task.parts names sst2; nli has: mnli, snli, anli"):
        load_task(TaskConfig(name="nli", folder=tmp_path, parts=["sst2"]))


def test_another_tasks_texts_as_public_ones(tmp_path: Path) -> None:
    for form in ("qqp", "paws", "sst2"):
        write(tmp_path / FORMS[form][1], FORMS[form][2])
    _, pools = load_task(TaskConfig(name="qqp", folder=tmp_path, public_task="paws"))
    assert pools.public is not None
    assert pools.public.texts == (("it é", "it 's"),)
    splits = make_splits(pools, DataConfig(private=1, public=1, labelled=0, test=0), 1)
    assert splits.public.labels is None  # nobody is given them
    assert splits.public_truth is not None  # both tasks have the same labels: how right sites are can be measured
    write(tmp_path / "public.csv", "text\nfree\n")
    _, pools = load_task(TaskConfig(name="sst2", folder=tmp_path, public=tmp_path / "public.csv"))
    assert pools.public is not None
    assert pools.public.texts == ("free",)
    with pytest.raises(TaskError, match="public_task = 'sst2' has 1 texts a row and qqp 2"):
        load_task(TaskConfig(name="qqp", folder=tmp_path, public_task="sst2"))


def test_coordinates_go_by_the_labels_names(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", "text,label\na,surprise\nb,none\n")
    write(tmp_path / "n.csv", "text,label\na,neutral\nb,entailment\nc,contradiction\n")
    write(tmp_path / "o.csv", "text,label\na,neutral\nb,positive\n")
    emotions, _ = load_task(TaskConfig(name="files", train=tmp_path / "t.csv"))
    assert emotions.coordinates == (VALENCE_AROUSAL["none"], VALENCE_AROUSAL["surprise"])
    inference, _ = load_task(TaskConfig(name="files", train=tmp_path / "n.csv"))
    assert inference.coordinates == tuple(INFERENCE_TRIANGLE[label] for label in inference.labels)
    assert load_task(TaskConfig(name="files", train=tmp_path / "o.csv"))[0].coordinates == ()
    given = TaskConfig(name="files", train=tmp_path / "t.csv", coordinates=[[1.0], [2.0]])
    assert load_task(given)[0].coordinates == ((1.0,), (2.0,))


def test_what_is_absent_is_named_with_its_places_and_the_keys(tmp_path: Path) -> None:
    told = (
        r"Looked in .* for train.tsv or .*gluebenchmark.com.*on the hub: nyu-mll/glue .sst2.*task.folder.*FEDSTILL_DATA"
    )
    with pytest.raises(TaskError, match=told):
        load_task(TaskConfig(name="sst2", folder=tmp_path))
    with pytest.raises(TaskError, match=r"\$FEDSTILL_DATA, which is not set(.|\n)*dataset nyu-mll/glue"):
        load_task(TaskConfig(name="sst2"))  # tests run with HF_HUB_OFFLINE
    with pytest.raises(TaskError, match=r"MELD.*github.com/declare-lab/MELD .data/MELD.; then set task.folder"):
        load_task(TaskConfig(name="meld"))
    write(tmp_path / "train.tsv", "text\tmark\nfine\t1\n")
    with pytest.raises(TaskError, match="no column for sentence, label of sst2"):
        load_task(TaskConfig(name="sst2", folder=tmp_path))
    write(tmp_path / "train_data.json", '{"a": 1}')
    with pytest.raises(TaskError, match="is not a list of conversations"):
        load_task(TaskConfig(name="iemocap", folder=tmp_path))
    write(tmp_path / "CB/train.jsonl", lines({"premise": "a", "label": "neutral"}))
    with pytest.raises(TaskError, match=r"CB/train.jsonl: a row is not as SuperGLUE has it .'hypothesis'"):
        load_task(TaskConfig(name="cb", folder=tmp_path))


def test_a_second_test_set_has_the_same_labels_or_is_refused(tmp_path: Path) -> None:
    head = "index\tgenre\tsentence1\tsentence2\tgold_label\n"
    for file, genre in (("train", "fiction"), ("dev_matched", "fiction"), ("dev_mismatched", "letters")):
        write(tmp_path / f"MNLI/{file}.tsv", head + f"0\t{genre}\ta\tb\tneutral\n" * 3)
    _, pools = load_task(TaskConfig(name="mnli", second_test="mnli-mm", folder=tmp_path))
    assert pools.test is not None
    assert pools.second is not None
    assert (pools.test.domains, pools.second.domains) == (("fiction",) * 3, ("letters",) * 3)
    write(tmp_path / "SST-2/train.tsv", FORMS["sst2"][2])
    with pytest.raises(TaskError, match=r"task.second_test = 'sst2' has labels.*tested as mnli is"):
        load_task(TaskConfig(name="mnli", second_test="sst2", folder=tmp_path))


# --- data sets of a site alone ---


def items(**values: object) -> tuple[list[Item], list[Item]]:
    return read_items(check(SiteTask, values, "site"), seed=1)


def test_squad_newsqa_news_and_questions(tmp_path: Path) -> None:
    who = {"question": "Who? ", "answers": [{"text": "Bob", "answer_start": 8}, {"text": "Bob", "answer_start": 8}]}
    squad = json.dumps({"data": [{"paragraphs": [{"context": "Ann met Bob", "qas": [who]}]}]})
    write(tmp_path / "squad/train-v1.1.json.gz", squad)
    write(tmp_path / "squad/dev-v1.1.json", squad)
    train, test = items(name="squad", folder=tmp_path)
    assert train == test
    assert [(i.text, i.answers, i.start) for i in train] == [(("Who?", "Ann met Bob"), ("Bob",), 8)]

    never = {"question": "When?", "answers": [], "is_impossible": True, "plausible_answers": [{"text": "Ann"}]}
    second = json.dumps({"data": [{"paragraphs": [{"context": "Ann met Bob", "qas": [who, never]}]}]})
    write(tmp_path / "squad/train-v2.0.json", second)
    write(tmp_path / "squad/dev-v2.0.json", second)
    train, test = items(name="squad2", folder=tmp_path)
    assert train == test
    assert [(i.text[0], i.answers, i.start) for i in train] == [("Who?", ("Bob",), 8), ("When?", ("",), -1)]

    asked = [{"q": "Who?", "consensus": {"s": 7, "e": 12}}, {"q": "x", "consensus": {"noAnswer": True}}]
    story = {"type": "train", "text": "Ann met Bob\n", "questions": asked}
    write(
        tmp_path / "newsqa/combined-newsqa-data-v1.json",
        json.dumps({"data": [story, {**story, "type": "test"}, story]}),
    )
    train, _ = items(name="newsqa", folder=tmp_path)
    assert [(i.answers, i.start) for i in train] == [(("Bob",), 8)]  # the other is kept back
    mrqa = {
        "context": "Ann met Bob",
        "qas": [{"question": "Who?", "detected_answers": [{"text": "Bob", "char_spans": [[8, 10]]}]}],
    }
    write(tmp_path / "mrqa/NewsQA.jsonl.gz", json.dumps({"header": {}}) + "\n" + lines(mrqa, mrqa))
    assert len(items(name="newsqa", folder=tmp_path / "mrqa")[0]) == 1

    write(tmp_path / "cnndm/train.csv", 'article,highlights,id\n"long, long",short,1\n')
    write(tmp_path / "cnndm/test.csv", "article,highlights,id\nb,c,2\n")
    train, test = items(name="cnndm", folder=tmp_path)
    assert [(i.text, i.answers) for i in (*train, *test)] == [("long, long", ("short",)), ("b", ("c",))]

    write(tmp_path / "msqg/train.src", "Bob [SEP] Ann met Bob\nAnn [SEP] Ann met Bob\n")
    write(tmp_path / "msqg/train.tgt", "who was met\nwho met bob\n")
    write(tmp_path / "msqg/test.src", "Ann [SEP] Ann left\n")
    write(tmp_path / "msqg/test.tgt", "who left\n")
    train, test = items(name="msqg", folder=tmp_path)
    assert (train[0].text, train[0].answers) == (("Bob", "Ann met Bob"), ("who was met",))
    write(tmp_path / "msqg/train.tgt", "who was met\n")
    with pytest.raises(TaskError, match=r"2 lines and train.tgt 1"):
        items(name="msqg", folder=tmp_path)


def test_slices_of_a_data_set_are_disjoint_and_together_the_whole(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", "".join(f'"{1 + n // 5}","t","{n}"\n' for n in range(20)))
    write(tmp_path / "test.csv", '"1","a","b"\n')
    slices = [items(name="ag_news", folder=tmp_path, share=(n, 3))[0] for n in (1, 2, 3)]
    assert [len(part) for part in slices] == [6, 7, 7]
    assert len({item for part in slices for item in part}) == 20
    assert all(len({item.answers for item in part}) > 1 for part in slices)
    few = Work(check(SiteTask, {"name": "ag_news", "folder": tmp_path, "share": (1, 10)}, "site"), seed=1)
    assert few.labels == ["World", "Sports", "Business", "Sci/Tech"]  # whatever its two texts are about


def test_a_sites_task_has_one_source_and_a_known_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"either `train`.*or `name`"):
        check(SiteTask, {"kind": "classification"}, "site")
    with pytest.raises(ConfigError, match=r"task.name = 'squat' is not known; did you mean squad or squad2\?"):
        check(SiteTask, {"name": "squat"}, "site")
    with pytest.raises(ConfigError, match=r"write \[2, 3\]"):
        check(SiteTask, {"name": "squad", "share": (4, 3)}, "site")
    with pytest.raises(ConfigError, match="belong to a known data set"):
        check(SiteTask, {"kind": "classification", "train": "t.csv", "share": (1, 3)}, "site")
    with pytest.raises(
        TaskError, match=r"task msqg: its files are not there.*microsoft/glge.*set folder in the site's"
    ):
        items(name="msqg", folder=tmp_path)
    with pytest.raises(TaskError, match=r"'squad' is no classification that sites share.*task.name = .mixed"):
        load_task(load_run('[task]\nname = "squad"\n').task)


# --- the real files ---

ROWS = {  # training texts, test texts
    "cola": (7250, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "qqp": (8999, 1000), "mnli": (8999, 1000),
    "qnli": (8999, 1000), "rte": (2490, 277), "wnli": (518, 71), "boolq": (3270, None), "cb": (250, 56),
    "copa": (400, 100), "multirc": (27243, 4848), "superglue-rte": (2490, 277), "wic": (5428, 638), "wsc": (554, 104),
    "snli": (99890, 9824), "anli": (3200, None), "paws": (677, None), "sst5": (8544, 2210), "amazon": (24398, 24375),
    "graded": (23703, None), "ag_news": (10001, 7600), "dailydialog": (8055, 7676), "meld": (9450, 2492),
}  # fmt: skip


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets under ../shared/data are not here")
def test_the_real_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", str(SHARED))
    for name, wanted in ROWS.items():
        task, pools = load_task(TaskConfig(name=name))
        assert (len(pools.train), None if pools.test is None else len(pools.test)) == wanted, name
        assert set(np.unique(pools.train.labels)) == set(range(len(task.labels))), name
    mrpc = load_task(TaskConfig(name="mrpc"))[1].train
    assert np.bincount(np.asarray(mrpc.labels)).tolist() == [1194, 2474]
    assert mrpc.texts[0][0].startswith('Amrozi accused his brother , whom he called " the witness "')
    paws = load_task(TaskConfig(name="paws"))[1].train
    assert not any(part.startswith(("b'", 'b"')) for text in paws.texts for part in text)
    absent = {name for name in [*TASKS, *SITE_SETS] if source_of(name) is None}
    assert absent == {"record", "amazon-stars", "iemocap", "squad2", "newsqa", "msqg"}


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets under ../shared/data are not here")
def test_the_real_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", str(SHARED))
    assert {name: len(SITE_SETS[name].load(None)[1]) for name in ("squad", "cnndm")} == {"squad": 10570, "cnndm": 0}
    assert len(items(name="cnndm", share=(2, 3))[0]) == 900
