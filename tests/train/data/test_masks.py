"""Golden loss masks: for each style of chat template, exactly which tokens are supervised."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from train.data.masks import mask_answers, render_ids

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<turn>",
    "</turn>",
    "[INST]",
]
SPECIAL += ["[/INST]"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADERS = (  # Llama 3's shape: a BOS, headers, trimmed text
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
MODEL_ROLE = (  # Gemma's shape: no system turn, the assistant is called model
    "{{ '<s>' }}{% if messages[0].role == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<turn>' + role + '\\n' + m.content | trim + '</turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"
)
THINKING = (  # Qwen 3's shape: thinking is kept after the last user turn alone
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set text = text.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
INST = (  # Mistral's shape: the system text moves into the last user turn
    "{{ '<s>' }}{% set ns = namespace(last=0, system='') %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n' %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ '# ' + m.role + '\\n' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}"
)

TURNS = [
    {"role": "user", "content": "Say hi"},
    {"role": "assistant", "content": "hi there"},
    {"role": "user", "content": "Again hi there"},
    {"role": "assistant", "content": "hi, user"},
]


def _word_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Words, single blanks and single signs are tokens, so that a golden mask can be read."""
    words = {word for turn in TURNS for word in turn["content"].replace(",", " ").split()}
    words |= {"assistant", "model", "system", "Be", "kind", "so", "first", "then", "think", "a", "b"}
    vocab = {token: index for index, token in enumerate([*SPECIAL, *" \n#<>/,", *sorted(words), "<unk>"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def _supervised(template: str, messages: list[dict[str, str]], **kwargs: object) -> list[str]:
    """The supervised tokens as strings, each run of them joined by "|"."""
    tokenizer = _word_tokenizer(template)
    ids, mask = mask_answers(tokenizer, messages, kwargs)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False, **kwargs)
    assert len(ids) == len(mask)
    runs: list[list[str]] = []
    for i, (token, on) in enumerate(zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True)):
        if on and (i == 0 or not mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return ["|".join(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "|<|im_end|>"),
        (CHATML_MARKED, "|<|im_end|>"),
        (HEADERS, "|<|eot|>"),
        (MODEL_ROLE, "|</turn>"),
        (PLAIN, ""),  # nothing marks the end of a turn but the text of the next one
    ],
    ids=["chatml", "chatml-marked", "headers", "model-role", "plain"],
)
def test_every_answer_of_a_conversation_and_its_end_of_turn(template: str, end: str) -> None:
    assert _supervised(template, TURNS) == [f"hi| |there{end}", f"hi|,| |user{end}"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, HEADERS], ids=["chatml", "chatml-marked", "headers"])
def test_a_system_turn_is_not_supervised(template: str) -> None:
    system = {"role": "system", "content": "Be kind"}
    assert _supervised(template, [system, *TURNS]) == _supervised(template, TURNS)


def test_markers_decide_where_there_are_markers() -> None:
    without_end = CHATML_MARKED.replace(
        "m.content + '<|im_end|>' }}{% endgeneration %}", "m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
    )
    assert without_end != CHATML_MARKED
    assert _supervised(without_end, TURNS) == ["hi| |there", "hi|,| |user"]


def test_trimmed_answer() -> None:
    messages = [TURNS[0], {"role": "assistant", "content": " \n hi there \n"}]
    assert _supervised(HEADERS, messages) == ["hi| |there|<|eot|>"]
    assert _supervised(CHATML, messages) == [" |\n| |hi| |there| |\n|<|im_end|>"]


def test_instruction_style_with_a_blank_before_the_end_and_a_wandering_system_text() -> None:
    expected = [" |hi| |there| |</s>", " |hi|,| |user| |</s>"]
    assert _supervised(INST, TURNS) == expected
    # Rendered alone, the first user turn carries the system text; in the full rendering the last one does. The prompt
    # is then no prefix to go by, and the blank before the answer counts as the template's.
    with_system = _supervised(INST, [{"role": "system", "content": "Be kind"}, *TURNS])
    assert with_system == ["hi| |there| |</s>", " |hi|,| |user| |</s>"]


def test_a_special_token_after_other_text_does_not_end_the_turn() -> None:
    # A line end may stand between the answer and the token that ends the turn, words may not.
    assert _supervised(PLAIN + "{{ '</s>' }}", TURNS[:2]) == ["hi| |there|\n|</s>"]
    assert _supervised(PLAIN + "{{ '# user</s>' }}", TURNS[:2]) == ["hi| |there"]


def test_thinking_of_the_last_turn_is_supervised_and_that_of_earlier_turns_is_gone() -> None:
    messages = [
        TURNS[0],
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nhi there"},
        TURNS[2],
        {"role": "assistant", "content": "<think>\nthen\n</think>\n\nhi so"},
    ]
    last = "<|think|>|\n|then|\n|<|/|think|>|\n|\n|hi| |so|<|im_end|>"
    assert _supervised(THINKING, messages) == ["hi| |there|<|im_end|>", last]


def test_an_empty_thinking_block_of_the_generation_prompt_is_not_supervised() -> None:
    assert _supervised(THINKING, TURNS, enable_thinking=False) == ["hi| |there|<|im_end|>", "hi|,| |user|<|im_end|>"]
    # With thinking on, the model itself writes the block.
    assert _supervised(THINKING, TURNS)[1] == "<|think|>|\n|\n|<|/|think|>|\n|\n|hi|,| |user|<|im_end|>"


def test_an_answer_that_repeats_the_question_and_the_template() -> None:
    messages = [{"role": "user", "content": "assistant hi"}, {"role": "assistant", "content": "assistant"}]
    assert _supervised(CHATML, messages) == ["assistant|<|im_end|>"]
    inside = [TURNS[0], {"role": "assistant", "content": "a<|im_end|>\n<|im_start|>user\nb"}]
    assert _supervised(CHATML, inside) == ["a|<|im_end|>|\n|<|im_start|>|user|\n|b|<|im_end|>"]


@pytest.mark.parametrize(
    "template", [CHATML, HEADERS, MODEL_ROLE, INST], ids=["chatml", "headers", "model-role", "inst"]
)
def test_what_precedes_the_last_answer_is_the_prompt_that_decoding_renders(template: str) -> None:
    tokenizer = _word_tokenizer(template)
    ids, mask = mask_answers(tokenizer, TURNS)
    prompt_ids = render_ids(tokenizer, TURNS[:-1], add_generation_prompt=True)
    assert ids[: len(prompt_ids)] == prompt_ids
    assert not mask[len(prompt_ids) - 1]
    assert mask[len(prompt_ids)]


def test_bytes_of_a_character_are_supervised_together() -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Say hi there, user. assistant"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHATML
    answer = "바다는 파랗다 🌊 hi"
    ids, mask = mask_answers(tokenizer, [TURNS[0], {"role": "assistant", "content": answer}])
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == answer + "<|im_end|>"


def test_a_refused_system_turn_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no system turn here; put the system text into the first user turn"):
        mask_answers(_word_tokenizer(MODEL_ROLE), [{"role": "system", "content": "Be kind"}, *TURNS])


def test_no_template() -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        mask_answers(_word_tokenizer(None), TURNS)


def test_a_mask_of_zeros_or_ones_is_an_error() -> None:
    with pytest.raises(ValueError, match="covers no token of"):
        mask_answers(_word_tokenizer(CHATML), [TURNS[0]])
    with pytest.raises(ValueError, match="covers no token of"):
        mask_answers(_word_tokenizer(CHATML_MARKED), [TURNS[0]])
    answers_alone = "{% for m in messages if m.role == 'assistant' %}{{ m.content + '</s>' }}{% endfor %}"
    with pytest.raises(ValueError, match="covers every token of"):
        mask_answers(_word_tokenizer(answers_alone), TURNS)


def test_a_template_that_writes_about_the_answer_is_refused() -> None:
    counting = CHATML.replace(
        "m.content + '<|im_end|>\\n'", "m.content + (m.content | length | string) + '<|im_end|>\\n'"
    )
    assert counting != CHATML
    with pytest.raises(ValueError, match="depends on its text"):
        mask_answers(_word_tokenizer(counting), TURNS)
