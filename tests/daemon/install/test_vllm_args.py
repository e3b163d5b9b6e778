"""What is printed to be pasted really says what vLLM and a shell need."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.install import vllm_args
from tests.shut_out import shut_out

RUNTIME_DIR = Path("/run/ho ned$x")


def drafter(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_flags_name_our_classes_and_dflash(tmp_path: Path) -> None:
    made = vllm_args.make(RUNTIME_DIR, model="m", drafter=drafter(tmp_path, block_size=16))
    pairs = dict(zip(made.flags[::2], made.flags[1::2], strict=True))
    speculative = json.loads(pairs["--speculative-config"])
    assert speculative == {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 15}
    assert pairs["--model"] == "m"
    assert pairs["--scheduler-cls"] == "honed.attach.scheduler.make_scheduler"
    assert pairs["--worker-extension-cls"] == "honed.attach.worker.HonedWorkerExtension"
    assert made.environment == {"HONED_RUNTIME_DIR": str(RUNTIME_DIR)}


def test_a_drafter_that_this_user_may_not_look_for_is_not_called_missing(tmp_path: Path) -> None:
    folder = drafter(tmp_path, block_size=16)
    with shut_out(tmp_path):
        with pytest.raises(ValueError, match=r"config.json can't be read .*Permission denied.*--draft-tokens"):
            vllm_args.make(RUNTIME_DIR, drafter=folder)
        made = vllm_args.make(RUNTIME_DIR, drafter=folder, method="dflash", num_draft_tokens=4)
    assert json.loads(made.flags[1])["num_speculative_tokens"] == 4


@pytest.mark.parametrize(
    ("config", "k"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, 5),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, 5),
        ({"speculators_model_type": "eagle3", "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, 3),
    ],
)
def test_an_eagle3_drafter_gets_its_method_and_its_draft_tokens(tmp_path: Path, config: dict[str, Any], k: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = json.loads(vllm_args.make(RUNTIME_DIR, drafter=str(tmp_path)).flags[1])
    assert (found["method"], found["num_speculative_tokens"]) == ("eagle3", k)
    with pytest.raises(ValueError, match="DFlash drafters only"):
        vllm_args.make(RUNTIME_DIR, drafter=str(tmp_path), tree_slots=15)


@pytest.mark.parametrize(
    ("name", "given", "method"),
    [
        ("Qwen3-8B_eagle3", {}, "eagle3"),
        ("head", {"method": "eagle3"}, "eagle3"),
        ("EAGLE-Qwen3-8B", {"num_draft_tokens": 5}, "eagle"),
        ("Qwen3-0.6B", {"num_draft_tokens": 5}, "draft_model"),
    ],
)
def test_a_plain_architecture_is_of_the_method_that_vllm_takes(
    tmp_path_factory: pytest.TempPathFactory, name: str, given: dict[str, Any], method: str
) -> None:
    folder = tmp_path_factory.mktemp("models") / name
    folder.mkdir()
    made = vllm_args.make(RUNTIME_DIR, drafter=drafter(folder, architectures=["LlamaForCausalLM"]), **given)
    found = json.loads(made.flags[1])
    assert (found["method"], found["num_speculative_tokens"]) == (method, 5)


@pytest.mark.parametrize("name", ["mtp", "qwen3_next_mtp", "glm4_moe_mtp"])
def test_a_head_in_its_target_needs_no_drafter(name: str) -> None:
    flags = vllm_args.make(RUNTIME_DIR, model="m", method=name).flags
    assert json.loads(flags[flags.index("--speculative-config") + 1]) == {"method": "mtp", "num_speculative_tokens": 3}


def test_an_exported_head_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}))
    found = json.loads(vllm_args.make(RUNTIME_DIR, drafter=str(tmp_path), num_draft_tokens=2).flags[1])
    assert found == {"method": "mtp", "model": str(tmp_path), "num_speculative_tokens": 2}


def test_a_method_without_a_drafter_says_how_many_tokens_it_needs() -> None:
    found = json.loads(vllm_args.make(RUNTIME_DIR, method="ngram", num_draft_tokens=4).flags[1])
    assert found == {"method": "ngram", "num_speculative_tokens": 4}
    with pytest.raises(ValueError, match="set --draft-tokens"):
        vllm_args.make(RUNTIME_DIR, method="ngram")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tree_slots": 31, "num_draft_tokens": 7}, "give one of --tree-slots and --draft-tokens"),
        ({"tree_slots": 7}, "7 tree slots hold no more than the drafter's chain of 7"),
        ({"num_draft_tokens": 8}, "8 draft tokens, but the drafter's block has 7"),
        ({"method": "eagle3"}, "is a drafter for method dflash, not for eagle3"),
        ({"method": "eagle3", "num_draft_tokens": 5}, "is a drafter for method dflash, not for eagle3"),
        ({"drafter": "", "method": "dflash"}, "method dflash drafts with a checkpoint of its own: give --drafter"),
    ],
)
def test_what_the_drafter_contradicts_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    given = {"drafter": drafter(tmp_path, block_size=8)} | fields
    with pytest.raises(ValueError, match=says):
        vllm_args.make(RUNTIME_DIR, **given)


def test_the_method_that_is_named_is_taken() -> None:
    found = json.loads(vllm_args.make(RUNTIME_DIR, drafter="org/head", method="eagle3", num_draft_tokens=4).flags[1])
    assert found["method"] == "eagle3"


def test_without_a_drafter_the_users_own_speculative_config_is_left_alone() -> None:
    assert "--speculative-config" not in vllm_args.make(RUNTIME_DIR).flags


def test_an_explicit_number_of_draft_tokens_needs_no_checkpoint() -> None:
    flags = vllm_args.make(RUNTIME_DIR, drafter="org/name", num_draft_tokens=7).flags
    assert '"num_speculative_tokens":7' in flags[1]


@pytest.mark.parametrize("config", [{}, {"block_size": 1}, {"block_size": "8"}])
def test_a_drafter_without_a_block_size_is_asked_for(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="--draft-tokens"):
        vllm_args.make(RUNTIME_DIR, drafter=drafter(tmp_path, **config))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path), "./drafter", "drafter"):
        with pytest.raises(ValueError, match=r"not a folder on this machine.*--draft-tokens") as caught:
            vllm_args.make(RUNTIME_DIR, drafter=name)
        assert f"there is no {Path(name) / 'config.json'}" in str(caught.value)


def test_a_drafter_whose_config_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"can't be read"):
        vllm_args.make(RUNTIME_DIR, drafter=str(tmp_path))


def test_every_draft_length_that_is_asked_for_is_in_vllms_table(tmp_path: Path) -> None:
    made = vllm_args.make(RUNTIME_DIR, drafter=drafter(tmp_path, block_size=16), graphs=[0, 3, 7], max_num_seqs=64)
    pairs = dict(zip(made.flags[::2], made.flags[1::2], strict=True))
    table = json.loads(pairs["--speculative-config"])["num_speculative_tokens_per_batch_size"]
    assert table == [[1, 61, 15], [62, 62, 7], [63, 63, 3], [64, 64, 0]], "the longest, but for what graphs need"
    assert pairs["--max-num-seqs"] == "64"
    shell = made.render("shell")
    assert "# num_speculative_tokens_per_batch_size gets CUDA graphs captured" in shell
    assert "without --graphs" not in shell


def test_it_says_what_is_missing_without_graphs(tmp_path: Path) -> None:
    made = vllm_args.make(RUNTIME_DIR, drafter=drafter(tmp_path, block_size=16))
    assert "# without --graphs, as 0,3,7: on vLLM's V2 runner with CUDA graphs, honed chooses between all drafts and none" in (
        made.render("shell")
    )
    assert "--graphs, as" not in vllm_args.make(RUNTIME_DIR).render("shell"), "nothing is drafted"


@pytest.mark.parametrize(
    ("lengths", "most"), [([7], 1), ([7, 0], 2), ([9, 5, 3, 1], 4), ([9, 5, 3, 1], 5), ([9, 5, 3, 1], 400)]
)
def test_a_table_covers_all_batches_and_has_every_length_once(lengths: list[int], most: int) -> None:
    table = vllm_args.table_for(lengths, most)
    assert [row[2] for row in table] == lengths
    assert [n for start, end, _ in table for n in range(start, end + 1)] == list(range(1, most + 1))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"graphs": [3]}, "--drafter"),
        ({"graphs": [99], "drafter": "org/name", "num_draft_tokens": 7}, "at most 7"),
        ({"graphs": [-1], "drafter": "org/name", "num_draft_tokens": 7}, "not negative"),
        ({"graphs": [1, 2, 3], "drafter": "org/name", "num_draft_tokens": 7, "max_num_seqs": 3}, "--max-num-seqs is 3"),
    ],
)
def test_graphs_that_cannot_be_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        vllm_args.make(RUNTIME_DIR, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("server", [vllm_args.SERVER, vllm_args.MODULE])
def test_shell_lines_survive_a_shell(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "server_command", lambda: server)
    made = vllm_args.make(RUNTIME_DIR, model="a b", drafter=drafter(tmp_path, block_size=8), engine_id="x")
    script = made.render("shell").replace(server, 'printf \'%s\\n\' "$HONED_RUNTIME_DIR" "$HONED_ENGINE_ID"')
    lines = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.splitlines()
    # `vllm serve` takes the model without its flag.
    assert lines == [str(RUNTIME_DIR), "x", *made.flags[server == vllm_args.SERVER :]]


def test_the_command_is_the_one_that_starts_here() -> None:
    script = Path(sys.executable).with_name("vllm")
    # Without vLLM here it is in another environment, where `vllm serve` starts.
    starts = not script.exists() or not subprocess.run([script, "serve", "--help"], capture_output=True, timeout=120).returncode
    assert vllm_args.server_command() == (vllm_args.SERVER if starts else vllm_args.MODULE)


def test_every_limit_is_a_comment_in_the_shell() -> None:
    text = vllm_args.make(RUNTIME_DIR).render("shell")
    assert all(f"# {limit}" in text for limit in vllm_args.LIMITS)


def test_systemd_gets_its_own_quoting() -> None:
    text = vllm_args.make(Path('/run/100%/a"b')).render("systemd")
    assert 'Environment="HONED_RUNTIME_DIR=/run/100%%/a\\"b"' in text
    assert "Wants=honed.service" in text
    assert "Requires=" not in text
    assert "--scheduler-cls" in text


def test_a_unit_names_the_model_itself() -> None:
    """With a second one, `vllm serve` ends with an error."""
    made = vllm_args.make(RUNTIME_DIR, model="m", method="mtp")
    assert "--model" not in made.render("systemd")
    assert "serve m " in made.render("shell") or "--model m" in made.render("shell")


def test_json_is_the_whole_of_it() -> None:
    made = vllm_args.make(RUNTIME_DIR, engine_id="e")
    document = json.loads(made.render("json"))
    assert document["environment"] == made.environment
    assert document["flags"] == made.flags
    assert document["limits"] == list(made.limits)


def test_the_environment_is_what_the_attachment_reads() -> None:
    environment = pytest.importorskip("honed.attach.engine.environment")
    made = vllm_args.make(RUNTIME_DIR, engine_id="left")
    settings = environment.from_environment(made.environment, data_parallel_index=2)
    assert settings is not None
    assert settings.runtime_dir == RUNTIME_DIR
    assert settings.engine_id == "left-2"
    assert shlex.split(made.render("shell").splitlines()[0])[0] == "export"


def test_tree_slots_take_the_place_of_the_block(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"block_size": 8}')
    made = vllm_args.make(Path("/run/honed"), drafter=str(tmp_path), tree_slots=31)
    speculative = json.loads(made.flags[made.flags.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 31
    assert made.environment["HONED_TREES"] == "1"
    assert "--enforce-eager" in made.render("shell").replace("\\\n", "").split()
    assert "HONED_TREES" not in vllm_args.make(Path("/run/honed"), drafter=str(tmp_path)).environment


def test_tree_slots_beside_graphs_have_graphs_for_steps_without_trees(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"block_size": 8}')
    made = vllm_args.make(Path("/run/honed"), drafter=str(tmp_path), tree_slots=31, graphs=[0, 7], max_num_seqs=16)
    speculative = json.loads(made.flags[made.flags.index("--speculative-config") + 1])
    assert [row[2] for row in speculative["num_speculative_tokens_per_batch_size"]] == [31, 7, 0]
    assert made.environment["HONED_TREES"] == "graphs"
    assert "--enforce-eager" not in made.flags


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tree_slots": 15}, "give --drafter or --method too"),
        (
            {"tree_slots": 15, "graphs": (31,), "drafter": "d", "method": "dflash"},
            "at most 15 are drafted",
        ),
        ({"tree_slots": 129, "drafter": "d"}, "takes 128 drafts a request at most"),
    ],
)
def test_tree_slots_that_cannot_be_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        vllm_args.make(Path("/run/honed"), **given)
