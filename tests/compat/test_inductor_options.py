"""Options of Inductor: what a plan may give, and what programs need whatever it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.codecache import FxGraphHashDetails

from graphcomp.compat import corrected
from graphcomp.compat.inductor_options import OWN, check_options, options_text, source_text, with_options
from graphcomp.errors import PlanError

END = "  (see docs/errors.md#planerror)"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"cpp_wraper": True},
            "Inductor has no option 'cpp_wraper'\n  where: Plan(compile_options={'cpp_wraper': ...})\n"
            "  what to do: see torch._inductor.list_options() for the names",
        ),
        (
            {"cpp_wrapper": "yes"},
            "Inductor's option 'cpp_wrapper' has another type\n  where: Plan(compile_options={'cpp_wrapper': ...})\n"
            "  expected: bool\n  got: 'yes'",
        ),
        (
            {"fallback_random": False},
            "Inductor's option 'fallback_random' cannot be set: dropout would draw other numbers than in eager PyTorch"
            "\n  where: Plan(compile_options={'fallback_random': ...})\n  what to do: leave it out",
        ),
        (
            {"triton.cudagraphs": True},
            "Inductor's option 'triton.cudagraphs' cannot be set: a replayed graph overwrites what its last call has "
            "left, while other microbatches need it\n  where: Plan(compile_options={'triton.cudagraphs': ...})\n"
            "  what to do: leave it out",
        ),
        (
            {"pad_outputs": True},
            "Inductor's option 'pad_outputs' cannot be set: what a program returns would have other strides than the "
            "programs that take it are compiled for\n  where: Plan(compile_options={'pad_outputs': ...})\n"
            "  what to do: leave it out",
        ),
        (
            {"aot_inductor.debug_compile": True},
            "Inductor's option 'aot_inductor.debug_compile' cannot be set: no program is compiled ahead of time\n"
            "  where: Plan(compile_options={'aot_inductor.debug_compile': ...})\n  what to do: leave it out",
        ),
        (
            {"pre_grad_fusion_options": {"a_pass": {}}},
            "Inductor's option 'pre_grad_fusion_options' cannot be set: it acts where torch.compile traces and "
            "differentiates a module, and programs are compiled behind that\n"
            "  where: Plan(compile_options={'pre_grad_fusion_options': ...})\n  what to do: leave it out",
        ),
        (
            {"post_grad_fusion_options": {"a_pass": {1: {2}}}},
            "Inductor's option 'post_grad_fusion_options' is given an object that ranks and saved programs cannot "
            "compare\n  where: Plan(compile_options={'post_grad_fusion_options': ...})\n"
            "  expected: numbers, strings, None, and lists, tuples and dictionaries of them\n"
            "  got: {'a_pass': {1: {2}}}",
        ),
    ],
    ids=["unknown", "type", "draws", "graphs", "padding", "ahead of time", "elsewhere", "object"],
)
def test_an_option_that_cannot_hold_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_options(options)
    assert str(caught.value) == f"{text}\n{END}"


def test_functions_are_refused_whose_text_is_another_in_every_process() -> None:
    with pytest.raises(PlanError, match="cannot compare"):
        check_options({"post_grad_custom_post_pass": lambda graph: None})


def test_every_option_may_be_given_as_it_is_by_default() -> None:
    """Whatever type Inductor gives an option, asking for it fails on none."""
    check_options(config.get_config_copy() | OWN)


def test_graphs_are_off_also_where_the_process_has_them_on() -> None:
    with config.patch({"triton.cudagraphs": True}):
        with pytest.raises(PlanError, match="overwrites"):
            check_options({"triton.cudagraphs": True})
        with with_options({}):
            assert not config.triton.cudagraphs


def test_others_may_be_given_and_hold_within() -> None:
    given = {"max_autotune": True, "size_asserts": True, "triton.cudagraphs": False, "cpp.threads": 1}
    check_options(given)
    outside = config.max_autotune
    with with_options(given):
        assert config.max_autotune and config.size_asserts and config.cpp.threads == 1
        assert config.fallback_random is OWN["fallback_random"]
    assert config.max_autotune is outside


def test_code_on_disk_is_of_the_corrections_as_they_are(tmp_path: Path) -> None:
    """What an older release has left there may be wrong, or call operators by other arguments."""
    with torch.compiler.config.patch(cache_key_tag="a user's"):
        with with_options({}):
            tag = torch.compiler.config.cache_key_tag
            details: Any = FxGraphHashDetails(None, [], {}, [])
        assert torch.compiler.config.cache_key_tag == "a user's"
    assert details.cache_key_tag == tag == f"a user's {source_text(Path(corrected.__file__).parent)}"
    texts = {}
    for name, files in {
        "as it is": {"one.py": "a", "two.py": "b"},
        "again": {"two.py": "b", "one.py": "a"},
        "changed": {"one.py": "a", "two.py": "c"},
        "moved": {"one.py": "ab", "two.py": ""},
        "renamed": {"one.py": "a", "six.py": "b"},
        "one more": {"one.py": "a", "two.py": "b", "three.py": ""},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
        texts[name] = source_text(folder)
    assert texts["as it is"] == texts["again"] and len(set(texts.values())) == 5


def test_options_are_text_that_is_alike_in_every_process() -> None:
    options = options_text({})
    assert options == options_text({}) and options["fallback_random"] == "True"
    assert not any(" at 0x" in text for text in options.values())
    assert "compile_threads" not in options
    assert options_text({"cpp_wrapper": True})["cpp_wrapper"] == "True"
