"""Recordings: a replay gives the bits of the live run, whatever stopped the recording; and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cli
import pandas as pd
import pytest
import tiny_models
import torch
from fake_model import FakeModel
from fake_model import documents as fake_documents
from safetensors.torch import load_file
from tiny import tiny_tokenizer

from sparsity_lab import record as record_module
from sparsity_lab.activations import LayerActivations
from sparsity_lab.cells import Cell, grid
from sparsity_lab.checks import CheckError
from sparsity_lab.dense import attention_probabilities
from sparsity_lab.documents import Document, Documents
from sparsity_lab.lightning import Lightning
from sparsity_lab.measurement import measure, sample_rows
from sparsity_lab.models.hf import HFModel
from sparsity_lab.models.recorded import RecordedModel, RecordingError, read_recording
from sparsity_lab.record import amount, record
from sparsity_lab.results import Results, collect, merge_results

ROOT = Path(__file__).parent.parent
LENGTH, ROWS = 96, 24
FAMILIES = ("llama", "gpt_oss", "gemma2")


def hf_model(family: str, **options: Any) -> HFModel:
    built = tiny_models.build(family, attn_implementation="eager")
    return HFModel(built, tiny_tokenizer(), name=family, fingerprint=f"{family}-weights", **options)


def token_documents(count: int = 2) -> Documents:
    items = [Document(i, tiny_models.tokens(LENGTH, seed=i)[0], f"random/{i}") for i in range(count)]
    return Documents(tuple(items), {"name": "random", "length": LENGTH, "seed": 0, "skip": 0, "digest": "d"})


def cells() -> list[Cell]:
    pools = [None, {"source_layer": 1, "topk_blocks": 4, "block_size": 2}]
    scorers = ["quest", "mean_key", "lightning", "oracle", "recency", "random"]
    return [
        *grid(scorers, topk=[2, 5], compress_ratio=[1, 4], window=8, candidate=pools),
        *grid(["quest", "mean_key"], topk=3, compress_ratio=4, window=8, share="kv_head"),
    ]


def run(model: Any, documents: Documents, which: list[Cell] | None = None, **options: Any) -> Results:
    options = {"rows": ROWS, "seed": 3} | options
    return measure(model, documents, which or cells(), scorers={"lightning": Lightning(model)}, **options)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def make(folder: Path, model: Any = None, documents: Documents | None = None, **options: Any) -> Path:
    options = {"rows": ROWS, "seed": 3} | options
    return record(model or FakeModel(), documents or fake_documents(2, LENGTH), folder, **options)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return make(tmp_path / "recording")


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_gives_the_bits_of_the_live_run(family: str, tmp_path: Path) -> None:
    model, documents = hf_model(family), token_documents()
    live = run(model, documents)
    replayed = RecordedModel(make(tmp_path / "r", model, documents), device="cpu")
    found = run(replayed, replayed.documents())
    assert found.cells == live.cells
    full = [layer for layer, window in tiny_models.windows(family).items() if window is None]
    assert sorted(found.tallies["layer"].unique()) == full  # sliding layers do not apply
    pd.testing.assert_frame_equal(found.tallies, live.tallies, check_exact=True)
    assert len(merge_results([live, found]).tallies) == len(live.tallies)


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_in_half_precision(family: str, tmp_path: Path) -> None:
    model, documents = hf_model(family), token_documents(1)
    model.model.to(torch.bfloat16)
    which = grid("mean_key", topk=4, compress_ratio=[1, 4])
    live = run(model, documents, which, detail_rows=4)
    replayed = RecordedModel(make(tmp_path / "r", model, documents), device="cpu")
    assert replayed.dtype == torch.bfloat16
    found = run(replayed, replayed.documents(), which, detail_rows=4)
    pd.testing.assert_frame_equal(found.tallies, live.tallies, check_exact=True)


def test_replay_of_pools_layers_and_tiles(tmp_path: Path) -> None:
    """Chosen layers, whose cells are those of a live run on the same layers; and tiles of any size."""
    model, documents = FakeModel(num_layers=5), fake_documents(2, LENGTH)
    live = run(model, documents, layers=[1, 2, 4])
    replayed = RecordedModel(make(tmp_path / "r", model, documents, layers=[4, 1, 2]), device="cpu")
    found = run(replayed, replayed.documents(), row_tile=7)
    assert found.cells == live.cells
    for column in live.tallies.columns:
        pd.testing.assert_series_equal(found.tallies[column], live.tallies[column], check_exact=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """The same bits on the GPU; on a CPU the recording stands for itself."""
    model, documents = hf_model("gpt_oss"), token_documents()
    model.model.to("cuda", dtype)
    live = run(model, documents)
    folder = make(tmp_path / "r", model, documents)
    replayed = RecordedModel(folder, device="cuda")
    found = run(replayed, replayed.documents())
    assert found.cells == live.cells
    pd.testing.assert_frame_equal(found.tallies, live.tallies, check_exact=True)
    elsewhere = RecordedModel(folder, device="cpu")
    assert set(run(elsewhere, elsewhere.documents()).cells).isdisjoint(live.cells)


def test_replay_of_windows_as_long_as_the_documents(tmp_path: Path) -> None:
    model = FakeModel(sliding={0: LENGTH, 1: LENGTH + 50, 2: 10}, softcap=4.0, sink=True)
    documents = fake_documents(1, LENGTH)
    live = run(model, documents)
    replayed = RecordedModel(make(tmp_path / "r", model, documents), device="cpu")
    assert replayed.windows() == {0: LENGTH, 1: LENGTH + 50, 3: None}
    seen: list[LayerActivations] = []
    replayed.observe(documents[0].tokens.unsqueeze(0), seen.append, replayed.layers)
    assert [(a.layer, a.window, a.softcap, a.scale) for a in seen] == [
        (layer, window, 4.0, 0.5) for layer, window in replayed.windows().items()
    ]
    pd.testing.assert_frame_equal(run(replayed, documents).tallies, live.tallies, check_exact=True)


def test_a_recording_of_all_rows_serves_any_rows_and_seed(tmp_path: Path) -> None:
    model, documents = FakeModel(), fake_documents(1, LENGTH)
    replayed = RecordedModel(make(tmp_path / "r", model, documents, rows=None), device="cpu")
    for options in ({"rows": 9, "seed": 1}, {"rows": 17, "seed": 2}, {"rows": None, "seed": 0}):
        replayed.check(replayed.documents(), layers=None, detail_rows=4, **options)
        live, found = run(model, documents, **options), run(replayed, replayed.documents(), **options)
        pd.testing.assert_frame_equal(found.tallies, live.tallies, check_exact=True)


def test_memory_layouts_do_not_change_the_numbers() -> None:
    """What a model leaves transposed gives the bits of what a recording gives back contiguous."""

    class Transposed(FakeModel):
        def activations(self, tokens: torch.Tensor, layer: int) -> LayerActivations:
            acts = super().activations(tokens, layer)
            moved = {n: getattr(acts, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v")}
            return LayerActivations(**{**acts.__dict__, **moved})

    documents = fake_documents(1, LENGTH)
    a, b = run(FakeModel(), documents), run(Transposed(), documents)
    pd.testing.assert_frame_equal(a.tallies, b.tallies, check_exact=True)


def test_the_recorded_model_is_the_model(tmp_path: Path) -> None:
    model, documents = hf_model("gpt_oss"), token_documents(3)
    replayed = RecordedModel(make(tmp_path / "r", model, documents, layers=[1, 3]), device="cpu")
    same = ("name", "fingerprint", "dtype", "device", "num_layers", "num_heads", "num_kv_heads", "hidden_size")
    for name in (*same, "max_length"):
        assert getattr(replayed, name) == getattr(model, name), name
    assert replayed.windows() == {layer: model.windows()[layer] for layer in (1, 3)}
    given = replayed.documents()
    assert given.source == documents.source
    assert [(d.index, d.id, d.name) for d in given] == [(d.index, d.id, d.name) for d in documents]
    assert [d.index for d in replayed.documents(shard=1, num_shards=2)] == [1]
    assert [d.index for d in replayed.documents(2)] == [0, 1]


def test_files_hold_the_sampled_rows_and_nothing_else(tmp_path: Path) -> None:
    model, documents = hf_model("gpt_oss"), token_documents(1)
    folder = make(tmp_path / "r", model, documents)
    file = folder / "documents" / documents[0].id / "layer-001.safetensors"
    found, acts = load_file(file), []
    model.observe(documents[0].tokens.unsqueeze(0), acts.append, [1])
    rows = sample_rows(LENGTH, ROWS, 3, documents[0].id)
    assert set(found) == {"q", "k", "v", "x", "output", "rows", "sink"}
    assert torch.equal(found["rows"], rows)
    assert torch.equal(found["q"], acts[0].q[0][:, rows])
    assert torch.equal(found["output"], acts[0].output[0][rows])
    for name in ("k", "v", "x"):
        assert torch.equal(found[name], getattr(acts[0], name)[0])
    assert torch.equal(found["sink"], acts[0].sink)


def test_another_type_of_device_is_another_source(recording: Path) -> None:
    """Numbers replayed elsewhere are not those of a live run there, so their cells must get other ids."""
    manifest = read_recording(recording)
    here = RecordedModel(recording, device="cpu")
    (recording / "manifest.json").write_text(json.dumps({**manifest, "device": "elsewhere"}))
    there = RecordedModel(recording, device="cpu")
    assert there.documents().source == {**here.documents().source, "recorded_on": "elsewhere"}
    which = grid("recency", topk=4)
    assert set(run(here, here.documents(), which).cells).isdisjoint(run(there, there.documents(), which).cells)


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("without", [{}, {"values": False}, {"inputs": False}, {"rows": None, "layers": [1]}])
def test_the_size_said_is_the_size_written(family: str, without: dict[str, Any], tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "r"
    options = {"model": hf_model(family), "documents": token_documents(2), "say": said.append, **without}
    make(folder, **options, dry_run=True)
    assert not folder.exists()
    assert "for all 2" in said[0]
    announced = int(said[1].split("(")[1].split(" bytes")[0].replace(",", "")) if "(" in said[1] else -1
    make(folder, **options)
    files = [path for path in (folder / "documents").rglob("*") if path.is_file() and path.name != ".lock"]
    written = sum(path.stat().st_size for path in files)
    assert announced <= written <= announced + 1024 * len(files)
    said.clear()
    make(folder, **options)
    assert said[1] == "to be written: 0 bytes for 0 of them"


def test_amounts_for_people() -> None:
    assert [amount(n) for n in (12, 1500, 12_345_678)] == [
        "12 bytes",
        "1.50 kB (1,500 bytes)",
        "12.35 MB (12,345,678 bytes)",
    ]


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(ValueError, match=r"record.folder=.*needs .* kB .*only 1.00 kB \(1,000 bytes\) are free"):
        make(tmp_path / "r")
    assert not (tmp_path / "r").exists()


# --- stopping and going on --------------------------------------------------------------------------------------------


class Dying(FakeModel):
    """Stops at the third layer of the second document."""

    def observe(self, tokens: torch.Tensor, observer: Any, layers: Any) -> None:
        def stop(acts: LayerActivations) -> None:
            if len(self.observed) == 3 and acts.layer == 2:  # the first forward was the probe for the size
                raise KeyboardInterrupt
            observer(acts)

        super().observe(tokens, stop, layers)


def test_an_interrupted_recording_goes_on(tmp_path: Path) -> None:
    documents = fake_documents(3, LENGTH)
    whole = make(tmp_path / "whole", documents=documents)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "r", Dying(), documents)
    assert list(read_recording(tmp_path / "r")["documents"]) == [documents[0].id]
    model, steps = FakeModel(), []
    make(tmp_path / "r", model, documents, progress=lambda done, total: steps.append((done, total)))
    assert len(model.observed) == 1 + 2
    assert steps == [(i + 1, 8) for i in range(8)]
    assert bytes_of(tmp_path / "r") == bytes_of(whole)


KILLED = """
import sys, time
sys.path[:0] = [{tests!r}]
from fake_model import FakeModel, documents
from sparsity_lab.record import record
import safetensors.torch
save = safetensors.torch.save_file
def slow(tensors, path, metadata):  # half a file, then nothing
    save(tensors, path, metadata=metadata)
    if "001." in str(path) and {second!r} in str(path):
        with open(path, "r+b") as file:
            file.truncate(500)
        print("writing", flush=True)
        time.sleep(60)
safetensors.torch.save_file = slow
record(FakeModel(), documents(3, {length}), {folder!r}, rows={rows}, seed=3)
"""


def test_a_killed_recording_goes_on(tmp_path: Path) -> None:
    """kill -9 in the middle of a file: the documents before it stay, its own is recorded again."""
    documents, folder = fake_documents(3, LENGTH), tmp_path / "r"
    script = KILLED.format(
        tests=str(ROOT / "tests"), second=documents[1].id, length=LENGTH, folder=str(folder), rows=ROWS
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        os.kill(process.pid, signal.SIGKILL)
    assert list(read_recording(folder)["documents"]) == [documents[0].id]
    assert list(folder.rglob(".layer-*"))  # what the kill left
    replayed = RecordedModel(folder)
    assert [d.id for d in replayed.documents()] == [documents[0].id]
    model = FakeModel()
    make(folder, model, documents)
    assert len(model.observed) == 1 + 2
    assert bytes_of(folder) == bytes_of(make(tmp_path / "whole", documents=documents))


@pytest.mark.parametrize("harm", ["cut", "changed", "missing"])
def test_a_damaged_file_is_named_and_recorded_again(harm: str, recording: Path) -> None:
    documents, before = fake_documents(2, LENGTH), bytes_of(recording)
    file = recording / "documents" / documents[1].id / "layer-002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    {
        "cut": lambda: file.write_bytes(content[:-100]),
        "changed": lambda: file.write_bytes(content),
        "missing": file.unlink,
    }[harm]()
    with pytest.raises(RecordingError, match=r"layer-002.safetensors: (damaged|missing).*record.py again"):
        run(replayed := RecordedModel(recording), replayed.documents())
    model, said = FakeModel(), []
    make(recording, model, say=said.append)
    assert model.observed == [[0, 1, 2, 3], [2]]  # the probe, then only the layer that is needed
    assert sum(str(file) in text for text in said) == 1
    assert bytes_of(recording) == before


def test_damaged_tokens_are_named_and_written_again(recording: Path) -> None:
    documents, before = fake_documents(2, LENGTH), bytes_of(recording)
    file = recording / "documents" / documents[0].id / "tokens.npy"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    with pytest.raises(RecordingError, match=r"tokens.npy: damaged"):
        RecordedModel(recording).documents()
    model = FakeModel()
    make(recording, model)
    assert len(model.observed) == 1
    assert bytes_of(recording) == before


def test_more_documents_and_shards_fill_one_folder(tmp_path: Path) -> None:
    documents = fake_documents(5, LENGTH)
    whole = make(tmp_path / "whole", documents=documents)
    for shard in (1, 0):
        part = Documents(documents.items[shard::2], documents.source)
        make(tmp_path / "r", documents=part)
    assert bytes_of(tmp_path / "r") == bytes_of(whole)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 12}, "rows=24, not rows=12"),
        ({"seed": 4}, "seed=3, not seed=4"),
        ({"layers": [0, 1]}, r"layers=\[0, 1, 2, 3\], not layers=\[0, 1\]"),
        ({"values": False}, "values=True, not values=False"),
        ({"model": FakeModel(fingerprint="other")}, "model=.*'fa4e'.*'other'"),
        ({"documents": fake_documents(2, LENGTH, seed=1)}, "data="),
    ],
)
def test_a_folder_holds_one_recording(change: dict[str, Any], message: str, recording: Path) -> None:
    before = bytes_of(recording)
    with pytest.raises(ValueError, match=f"holds a recording with {message}.*another folder"):
        make(recording, **change)
    assert bytes_of(recording) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [9]}, r"record.layers=\[9\]: the model has"),
        ({"rows": 0}, "record.rows=0"),
        ({"documents": Documents((), {})}, "no documents"),
        ({"model": FakeModel(max_length=50)}, "data.length=96.*at most 50"),
    ],
)
def test_bad_options_of_record(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        record(**{"model": FakeModel(), "documents": fake_documents(2, LENGTH), "folder": tmp_path / "r"} | options)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("values", [True, False])
def test_an_attention_that_is_not_known_is_not_recorded(values: bool, tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="differs from the model's own output"):
        make(tmp_path / "r", FakeModel(lie=1.1), values=values)
    assert not list((tmp_path / "r").rglob("*.safetensors"))


GOOD = {"rows": ROWS, "seed": 3, "layers": None, "detail_rows": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 8}, "measure.rows=8: .* holds 24 rows"),
        ({"rows": None}, "measure.rows=None"),
        ({"seed": 0}, "measure.seed=0: .* seed=3"),
        ({"layers": [1, 3, 8]}, r"measure.layers=\[3, 8\]: not recorded; .* layers \[0, 1, 2\]"),
        ({"documents": fake_documents(3, LENGTH)}, f"document {fake_documents(3, LENGTH)[2].id}: not among the 2"),
    ],
)
def test_what_was_not_recorded_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    replayed = RecordedModel(make(tmp_path / "r", layers=[0, 1, 2]))
    replayed.check(**{"documents": replayed.documents(), **GOOD})
    with pytest.raises(ValueError, match=message):
        replayed.check(**{"documents": replayed.documents(), **GOOD} | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 23}, r"layer 0: rows .* are not there; only 24 rows were kept"),
        ({"seed": 0}, r"layer 0: rows .* are not there"),
        ({"layers": [3]}, r"measure.layers=\[3\]"),
        ({"documents": fake_documents(1, LENGTH, seed=1)}, "document .*: not among"),
    ],
)
def test_without_hydra_the_same_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    replayed = RecordedModel(make(tmp_path / "r", layers=[0, 1, 2]))
    with pytest.raises(ValueError, match=message):
        run(replayed, **{"documents": replayed.documents(), **options})


def test_what_was_left_out_is_refused_and_the_rest_is_exact(tmp_path: Path) -> None:
    model, documents = FakeModel(), fake_documents(2, LENGTH)
    plain = grid(["quest", "mean_key"], topk=4, compress_ratio=4)
    lean = RecordedModel(make(tmp_path / "r", model, documents, values=False, inputs=False), device="cpu")
    live = run(model, documents, plain, detail_rows=0)
    pd.testing.assert_frame_equal(
        run(lean, lean.documents(), plain, detail_rows=0).tallies, live.tallies, check_exact=True
    )
    with pytest.raises(ValueError, match=r"measure.detail_rows=4: needs v, .*record.values=false.*detail_rows=0"):
        lean.check(documents, **GOOD)
    with pytest.raises(ValueError, match=r"scorer=lightning: needs x, .*record.inputs=false"):
        lean.check(documents, **{**GOOD, "detail_rows": 0}, scorers=["quest", "lightning"])
    with pytest.raises(ValueError, match="layer 0: needs v"):
        run(lean, documents, plain, detail_rows=4)
    with pytest.raises(ValueError, match="layer 0: needs x"):
        run(lean, documents, grid("lightning", topk=4), detail_rows=0)


def test_recordings_that_are_none(tmp_path: Path, recording: Path) -> None:
    with pytest.raises(RecordingError, match="no recording here"):
        RecordedModel(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"data.num_documents=3: .* holds 2"):
        RecordedModel(recording).documents(3)
    with pytest.raises(ValueError, match=r"shard=2 gets none"):
        RecordedModel(recording).documents(shard=2, num_shards=3)
    with pytest.raises(ValueError, match=r"data.shard=2: must be"):
        RecordedModel(recording).documents(shard=2, num_shards=2)
    manifest = recording / "manifest.json"
    text = manifest.read_text()
    for content, message in ((text[:50], "damaged"), ('{"schema": 1}', "recording_schema=None"), ("[]", "=None")):
        manifest.write_text(content)
        with pytest.raises(RecordingError, match=message):
            RecordedModel(recording)
        with pytest.raises(RecordingError, match=message):
            make(recording)
    manifest.write_text(json.dumps({**json.loads(text), "documents": {}}))
    with pytest.raises(RecordingError, match="no whole document yet"):
        RecordedModel(recording)


def test_rows_held_are_found_and_others_named() -> None:
    acts = FakeModel().activations(fake_documents(1, 30)[0].tokens.unsqueeze(0), 0)
    held = torch.tensor([3, 11, 29])
    kept = {**acts.__dict__, "q": acts.q[:, :, held], "output": acts.output[:, held], "rows": held}
    part, rows = LayerActivations(**kept), torch.tensor([29, 3])
    assert torch.equal(part.query_rows(rows), acts.query_rows(rows))
    assert torch.equal(part.output_rows(rows), acts.output_rows(rows))
    assert torch.equal(attention_probabilities(part, rows), attention_probabilities(acts, rows))
    for bad in ([4], [3, 30], [0]):
        with pytest.raises(ValueError, match=f"layer 0: rows {bad[-1]} are not there; only 3 rows"):
            part.query_rows(torch.tensor(bad))


# --- the command lines ------------------------------------------------------------------------------------------------


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    overrides = [argument for argument in arguments[1:] if argument != "-m"]
    done = cli.run(
        cwd.with_name(f"{cwd.name}-commands"), *overrides, flags=["-m"] * ("-m" in arguments),
        script=ROOT / "experiments" / arguments[0], prepare=partial(os.chdir, cwd),
    )  # fmt: skip
    return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)


@pytest.mark.slow
def test_record_then_recall_on_the_command_line(tmp_path: Path) -> None:
    tiny_models.make("llama", tmp_path / "tinyllama")
    model = ["model=hf", "model.path=tinyllama", "data.num_documents=2", "data.length=96"]
    sample = ["rows=16", "seed=1"]

    def recall(*arguments: str) -> subprocess.CompletedProcess[str]:
        what = ["selection.topk=[4,8]", "selection.compress_ratio=[1,4]", "measure.detail_rows=4"]
        return python("recall.py", *arguments, *what, *(f"measure.{s}" for s in sample), cwd=tmp_path)

    dry = python("record.py", *model, *(f"record.{s}" for s in sample), "dry_run=true", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert "nothing written" in dry.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"tinyllama"}
    for more in (["data.num_documents=1"], ["-m", "data.shard=0,1", "data.num_shards=2"]):
        made = python("record.py", *model, *(f"record.{s}" for s in sample), *more, cwd=tmp_path)
        assert made.returncode == 0, made.stderr
    assert "0 bytes for 0 of them" in made.stdout  # the first document, a moment later
    folder = "recordings/tinyllama-pydoc-96"
    replay = ["model=recorded", f"model.path={folder}", "data=recorded"]
    assert read_recording(tmp_path / folder)["config"]["record"]["rows"] == 16

    assert recall(*model, "results_dir=live").returncode == 0
    (tmp_path / "tinyllama").rename(tmp_path / "gone")
    done = recall(*replay, "results_dir=replayed")
    assert done.returncode == 0, done.stderr
    live, found = collect(tmp_path / "live"), collect(tmp_path / "replayed")
    assert (tmp_path / "replayed/recall/tinyllama-pydoc-96/summary.csv").exists()
    assert found.cells == live.cells
    pd.testing.assert_frame_equal(found.tallies, live.tallies, check_exact=True)
    again = recall(*replay, "results_dir=live", "-m", "scorer=mean_key,recency")  # goes on in the live run's folder
    assert again.returncode == 0, again.stderr
    assert set(collect(tmp_path / "live").cells) > set(live.cells)


@pytest.mark.slow
def test_refusals_on_the_command_line(tmp_path: Path) -> None:
    make(tmp_path / "r", documents=fake_documents(2, LENGTH))
    replay = ["model=recorded", "model.path=r", "data=recorded"]
    for arguments, message in [
        (["model=recorded", "model.path=r"], "add data=recorded"),
        (["data=recorded"], "add model=recorded"),
        (["model=recorded", "model.path=nothing", "data=recorded"], "no recording here"),
        ([*replay, "measure.seed=3"], "measure.rows=128"),
        ([*replay, f"measure.rows={ROWS}"], "measure.seed=0"),
        ([*replay, f"measure.rows={ROWS}", "measure.seed=3", "data.length=50"], "data.length=50"),
    ]:
        failed = python("recall.py", *arguments, cwd=tmp_path)
        assert failed.returncode != 0
        assert message in failed.stderr, (arguments, failed.stderr)
    assert not list(tmp_path.rglob("tallies.parquet"))
    failed = python("record.py", *replay, cwd=tmp_path)
    assert failed.returncode != 0
    assert "is a recording already" in failed.stderr
