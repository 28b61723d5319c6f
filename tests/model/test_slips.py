"""A call of an offered tool whose arguments fit counts in spite of a slip of form, where calls may stand."""

from __future__ import annotations

from typing import Any

import pytest
from test_believed_calls import TEXT, calls_in, tool
from test_splitting import markup, outcome, splitter, wide

TOOLS = [
    tool("bash", ("command",), command=TEXT, timeout={"type": "integer"}, bg={"type": ["boolean", "null"]}),
    tool("write", ("path", "content"), path=TEXT, content=TEXT),
    tool("clock"),
    tool("get-weather", ("city",), city=TEXT),
    tool("send", **{"from": TEXT, "class": TEXT, "reply-to": TEXT}),
]
LS: list[tuple[str, Any]] = [("bash", {"command": "ls"})]
CLOCK: list[tuple[str, Any]] = [("clock", {})]
WRITE: list[tuple[str, Any]] = [("write", {"path": "a", "content": "b"})]
BASH = '[TOOL_CALLS]bash{"command": "ls"}'
JSON = '{"name": "bash", "arguments": {"command": "ls"}}'

PATH, CONTENT = "<parameter=path>\na\n", "<parameter=content>\nb\n"
PATH_CONTENT = '<parameter name="path">a<parameter name="content">b</parameter>'
INVOKE = '<invoke name="bash">\n<parameter name="command">ls</parameter>\n</invoke>'
COMMAND = "<parameter=command>\nls\n"
END = "</parameter>\n"


def check(family: str, text: str, wanted: list[tuple[str, Any]], said: str = "") -> None:
    assert calls_in(family, text, TOOLS) == wanted
    assert outcome(splitter(family, tools=TOOLS), [wide(text)])[0].strip() == said
    assert calls_in(family, f"Now.\n{text}\n", TOOLS) == wanted


# Python's syntax


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ('get-weather(city="Rome")', [("get-weather", {"city": "Rome"})]),
        ('send(from="a", class="b")', [("send", {"from": "a", "class": "b"})]),
        ('send(reply-to="a")', [("send", {"reply-to": "a"})]),
        ('bash(command="a\nb")', [("bash", {"command": "a\nb"})]),
        ("bash(command='a\nb')", [("bash", {"command": "a\nb"})]),
        ('bash(command="""a"b""")', [("bash", {"command": 'a"b'})]),
        (r"bash(command=r'\d', bg=None)", [("bash", {"command": r"\d", "bg": None})]),
        (r"bash(command='\x1b\033\u20ac\'\/')", [("bash", {"command": "\x1b\x1b\u20ac'\\/"})]),
        ('bash(command="a" "b", timeout=1_000,)', [("bash", {"command": "ab", "timeout": 1000})]),
        ('bash(command="ls", bg=true)  # lists', [("bash", {"command": "ls", "bg": True})]),
        ("clock", CLOCK),
        ('{"name": "bash", "arguments": {"command": "ls"}}', LS),
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        ("pythonic", "<|tool_call_start|>[{}]<|tool_call_end|>"),
        ("olmo3", "<function_calls>\n{}\n</function_calls>"),
        ("llama4_bare", "<|python_start|>[{}]<|python_end|>"),
    ],
    ids=lambda one: str(one[0]),
)
def test_a_tool_call_in_python_with_reserved_words_or_raw_line_breaks_is_parsed(
    around: tuple[str, str], code: str, wanted: list[tuple[str, Any]]
) -> None:
    family, form = around
    check(family, form.replace("{}", code), wanted)


# JSON


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (JSON + "}", LS),
        (JSON + "]", LS),
        (f"{JSON},", LS),
        (JSON.replace('"', "'"), LS),
        (
            JSON[:-2] + ', "timeout": 3, "bg": None,},}',
            [("bash", {"command": "ls", "timeout": 3, "bg": None})],
        ),
        (r'{"name": "bash", "arguments": {"command": "it\'s \d"}}', [("bash", {"command": r"it's \d"})]),
        ('{name: "bash", arguments: {command: "ls"}}', LS),
        ('{"bash": {"command": "ls"}}', LS),
        ('{"function": "bash", "parameters": {"command": "ls"}}', LS),
        ('bash\n```json\n{"command": "ls"}\n```', LS),
        ('bash\n{"command": "ls"}', LS),
        (f"```json\n{JSON}\n```", LS),
        (f"{JSON}, {JSON}", LS + LS),
        (f"[{JSON}\n{JSON}]", LS + LS),
        ('{"name": "clock"}', CLOCK),
        ('{"name": "clock", "arguments": ""}', CLOCK),
        ('{"name": "clock", "arguments": None}', CLOCK),
        ('{"name": "clock", "arguments": []}', CLOCK),
        ("clock", CLOCK),
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        ("generic", "<tool_call>\n{}\n</tool_call>"),
        ("nemotron", "<TOOLCALL>[{}]</TOOLCALL>"),
        ("phi4", "<|tool_call|>{}<|/tool_call|>"),
        ("hunyuan", "<tool_calls>{}</tool_calls>"),
        ("hunyuan", "<tool_calls><tool_call>{}</tool_call></tool_calls>"),
        ("qwen3_coder", "<tool_call>{}</tool_call>"),
        ("glm47", "<tool_call>{}</tool_call>"),
    ],
    ids=lambda one: str(one[0]),
)
def test_a_json_tool_call_with_single_quotes_missing_quotes_or_surplus_brackets_is_parsed(
    around: tuple[str, str], body: str, wanted: list[tuple[str, Any]]
) -> None:
    family, form = around
    check(family, form.replace("{}", body), wanted)


#: Short names of the marks of Kimi K2 (section, call, arguments, end) and K3.
SHORT = {
    "<S>": "<|tool_calls_section_begin|>",
    "</S>": "<|tool_calls_section_end|>",
    "<C>": "<|tool_call_begin|>",
    "<A>": "<|tool_call_argument_begin|>",
    "</C>": "<|tool_call_end|>",
    "<o>": "<|open|>",
    "<c>": "<|close|>",
    "<s>": "<|sep|>",
    "<~B~>": "<~tool▁calls▁begin~><~tool▁call▁begin~>",
    "<~E~>": "<~tool▁call▁end~>",
}


def long(text: str) -> str:
    for short, name in SHORT.items():
        text = text.replace(short, name)
    return wide(text)


@pytest.mark.parametrize(
    ("family", "text", "wanted"),
    [
        ("mistral", BASH, LS),
        ("mistral_args", BASH, LS),
        ("mistral", f"[TOOL_CALLS]{JSON}", LS),
        ("mistral", "[TOOL_CALLS]clock[ARGS]", CLOCK),
        ("mistral", "[TOOL_CALLS]clock", CLOCK),
        ("mistral", BASH.replace("}", ', "timeout": 0x1f}'), [("bash", {"command": "ls", "timeout": 31})]),
        ("granite", f"<|tool_call|>{JSON}", LS),
        ("llama", '<|python_tag|>{"name": "clock"}', CLOCK),
        ("kimi_k2", "<S><C>functions.clock:0<A></C></S>", CLOCK),
        ("kimi_k2", '<C>functions.bash:0<A>{"command": "ls"}</C>', LS),
        ("kimi_k2", '<S><C>bash:0{"command": "ls"}</C></S>', LS),
        ("deepseek_v31", '<~tool▁call▁begin~>bash<~tool▁sep~>{"command": "ls"}<~E~>', LS),
        ("deepseek_v31", "<~B~>clock<~tool▁sep~><~E~>", CLOCK),
        ("deepseek_v3", '<~B~>bash<~tool▁sep~>{"command": "ls"}', LS),
        ("gemma4", "<|tool_call>call:clock<tool_call|>", CLOCK),
        ("gemma4", '<|tool_call>call:bash{command:"ls"}}<tool_call|>', LS),
        ("gemma4", "<|tool_call>call:bash(command='ls')<tool_call|>", LS),
        ("function_gemma", "<start_function_call>call:clock<end_function_call>", CLOCK),
        ("generic", f"```json\n{JSON}\n{JSON}\n```", LS + LS),
        ("generic", f"[{JSON}]", LS),
        ("generic", f"<tools>\n{JSON}\n</tools>", LS),
        ("json_tools", f"<tools> {JSON} </tool", LS),
        ("json_tools", f"<function>\n{JSON}\n</function>", LS),
        ("generic", f"<function-call> {JSON}", LS),
        ("generic", f"```xml\n<tools>\n[{JSON},\n{JSON}]\n</tools>\n```", LS + LS),
        ("json_tools", JSON.replace("}}", ', "bg": None}}'), [("bash", {"command": "ls", "bg": None})]),
        ("harmony", "<|channel|>commentary to=functions.clock<|message|><|call|>", CLOCK),
        ("harmony", "<|channel|>commentary to=functions.bash<|message|>{'command': 'ls'}}<|call|>", LS),
        ("minimax_m2", INVOKE, LS),
        (
            "minimax_m2",
            f'<minimax:tool_call>\n<invoke name="write">\n{PATH_CONTENT}</invoke>\n</minimax:tool_call>',
            WRITE,
        ),
        (
            "muse_spark",
            '<atem:invoke name="bash"><atem:parameter name="command">ls</atem:parameter></atem:invoke>',
            LS,
        ),
        (
            "deepseek_v32",
            '<~DSML~invoke name="bash"><~DSML~parameter name="command">ls</~DSML~parameter></~DSML~invoke>',
            LS,
        ),
        (
            "glm47",
            (
                "<tool_call>write\n<arg_key>path</arg_key><arg_value>a<arg_key>content</arg_key><arg_value>b"
                "</arg_value></tool_call>"
            ),
            WRITE,
        ),
        ("longcat", '<longcat_tool_call>{"name": "clock"}</longcat_tool_call>', CLOCK),
        (
            "kimi_k3",
            (
                '<o>tools<s><o>call tool="bash"<s><o>json type="object"<s>{"command": "ls"}<c>json<s>'
                "<c>call<s><c>tools<s>"
            ),
            LS,
        ),
        (
            "kimi_k3",
            '<o>call tool="bash"<s><o>argument key="command" type="string"<s>ls<c>argument<s><c>call<s>',
            LS,
        ),
    ],
)
def test_a_tool_call_with_a_missing_or_surplus_marker_of_its_model_familys_format_is_parsed(
    family: str, text: str, wanted: list[tuple[str, Any]]
) -> None:
    assert calls_in(family, long(text), TOOLS) == wanted
    assert outcome(splitter(family, tools=TOOLS), [long(text)])[0] == ""


# Tags


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (f"<function=write>\n{PATH}{CONTENT}{END}</function>\n", WRITE),
        (f"<function=write>\n{PATH}{END}{CONTENT}</function>\n", WRITE),
        (f"<function=write>\n{PATH}</path>\n{CONTENT}</content>\n</function>\n", WRITE),
        (f"<function=bash>\n{COMMAND}</function>\n", LS),
        (f"<function=bash>\n{COMMAND}{END}", LS),
        ('<function="bash">\n<parameter="command">\nls\n</parameter>\n</function>\n', LS),
        ('<function name="bash">\n<parameter name="command">ls</parameter>\n</function>\n', LS),
        ('<function=bash>{"command": "ls"}</function>\n', LS),
        ("<function=clock></function>\n", CLOCK),
        (f"<function=bash>\n{COMMAND}{END}</function>\n" * 2, LS + LS),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_coder", "seed_oss"])
def test_a_tool_call_in_a_tag_format_with_one_tag_missing_is_still_parsed(
    family: str, lines: str, wanted: list[tuple[str, Any]]
) -> None:
    begin, end = (
        ("<tool_call>", "</tool_call>")
        if family == "qwen3_coder"
        else ("<seed:tool_call>", "</seed:tool_call>")
    )
    check(family, f"{begin}\n{lines}{end}", wanted)
    if "</function>" in lines and "</parameter>\n</function>" in lines and "name=" not in lines:
        for text in (lines, f"{lines}{end}", f"\n{lines}\n"):
            check(family, text, wanted)


# What stands around a call


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("generic", f"<tool_call>\n{JSON}\n^"),
        ("generic", f"<tool_call>\n{JSON}\n^</tool_call>"),
        ("generic", f"<tool_call>\n{JSON}\n</tool_call>\n</tool_call>\n^"),
        ("pythonic", '<|tool_call_start|>[bash(command="ls")]\n^'),
        ("kimi_k2", '<S><C>functions.bash:0<A>{"command": "ls"}</C>\n^'),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="bash"><parameter name="command">ls</parameter></invoke>^',
        ),
        ("qwen3_coder", f"<tool_call>\n<function=bash>\n{COMMAND}{END}</function>\n^"),
        ("qwen3_coder", f"<tool_call>\n<function=bash>\n{COMMAND}{END}</function>\n^</tool_call>"),
        ("qwen3_coder", f"<function=bash>\n{COMMAND}{END}</function>\n</tool_call>\n^"),
        ("deepseek_v31", '<~B~>bash<~tool▁sep~>{"command": "ls"}<~E~>\n^'),
        ("llama", f"<|python_tag|>{JSON}\n^"),
    ],
)
@pytest.mark.parametrize("more", ["Then I'll wait.", "Done", "I write {x}."])
def test_text_after_a_tool_call_whose_end_marker_is_missing_is_shown_as_text(
    family: str, text: str, more: str
) -> None:
    text = long(text.replace("^", more))
    assert calls_in(family, text, TOOLS) == LS
    assert outcome(splitter(family, tools=TOOLS), [text])[0].strip() == more


def test_the_markers_around_a_kimi_k3_answer_are_not_part_of_its_text() -> None:
    text, call = (
        "<o>response<s>Well.<c>response<s>",
        '<o>tools<s><o>call tool="clock"<s><c>call<s><c>tools<s>',
    )
    for one, num_calls in ((text, 0), (text + call, 1)):
        said, _, calls, malformed = outcome(splitter("kimi_k3", tools=TOOLS), long(one))
        assert (said.strip(), len(calls), malformed) == ("Well.", num_calls, False)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("generic", '<tool_call>{"name": "bash", "arguments": {"command": "echo "}}" > f"}}</tool_call>'),
        ("generic", f"<tool_call>{JSON}\n{JSON.replace('command', 'cmd')}</tool_call>"),
        ("generic", '<tool_call>{"name": "bash", "arguments": {"command": "ls"'),
        ("generic", f"Like this:\n```json\n{JSON}\n```"),
        ("generic", f"`<tool_call>`{JSON}"),
        ("generic", f"<tool_response>\n{JSON}\n</tool_response>"),
        ("generic", f"<think>\n{JSON}\n</think>"),
        ("pythonic", "<|tool_call_start|>[bash(command='echo ')]' > f')]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[bash(command=f'{a}')]<|tool_call_end|>"),
        ("generic", f"Like this:\n\n  ```xml\n\n<tool_call>{JSON}</tool_call>\n```\nor so."),
        ("qwen3_coder", "The `<function=bash>` tag begins a call."),
        ("generic", f"Like this:\n```\necho<tool_call>{JSON}</tool_call>\n```"),
        ("qwen3_coder", f"So:\n```\n<function=bash>\n{COMMAND}{END}</function>\n```"),
        ("qwen3_coder", f"<tool_call>\n<function=bash>\n{COMMAND}</tool_call>"),
        (
            "qwen3_coder",
            f"<tool_call>\n<function=bash>\n{COMMAND}<parameter=nosuch>\n1\n{END}</function>\n</tool_call>",
        ),
        ("mistral", "[TOOL_CALLS]clock is what I call"),
        ("kimi_k2", "<|tool_call_begin|> begins a call"),
    ],
)
def test_a_tool_call_that_is_quoted_or_can_be_parsed_in_two_ways_is_shown_as_text(
    family: str, text: str
) -> None:
    assert calls_in(family, text, TOOLS) == []
    assert outcome(splitter(family, tools=TOOLS), [wide(text)])[0].strip() == text


def test_a_tool_call_is_streamed_as_soon_as_it_is_complete() -> None:
    for family, text in (
        ("generic", f"<tool_call>{JSON}</tool_call>"),
        ("mistral", BASH),
        ("granite", f"<|tool_call|>{JSON}"),
    ):
        assert len(splitter(family, tools=TOOLS).push(text).calls) == 1, family


def test_a_tool_call_is_parsed_after_a_code_block_and_inside_a_code_block_that_begins_the_answer() -> None:
    call = f"<tool_call>{JSON}</tool_call>"
    for text in (
        f"```\n{call}\n```",
        f"So:\n```\nls\n```\n{call}",
        f"```\nls\n```\n{call}",
        f"```ls```\n{call}",
    ):
        assert calls_in("generic", text, TOOLS) == LS, text


@pytest.mark.parametrize("family", ["json_tools", "mistral_args", "kimi_k3", "minimax_m2", "deepseek_v31"])
def test_tool_call_syntax_inside_reasoning_is_shown_as_reasoning_and_not_parsed_as_calls(family: str) -> None:
    opens, closes = markup(family).reasoning or ("", "")
    for body in (f"<tool_call>{JSON}}}</tool_call>", BASH, '<invoke name="clock"></invoke>'):
        said, thought, calls, _ = outcome(splitter(family, tools=TOOLS), f"{opens}{body}{closes}Well.")
        assert (said, thought, calls) == ("Well.", body, [])
