"""To run by hand: schemas of all kinds, regular expressions and grammars, answered by random
tokens, a random model and a real one, with n-gram drafts in every second answer.

python -m tests.engine_core.structured_output.campaign [--model smollm2-135m-instruct] [--first 0]

Every answer that was not cut, by its length or a limit of the matcher, is checked by `jsonschema`,
`re` or a recogniser. Schemas with a keyword that is not enforced must be refused by its name. The
last line is JSON."""

import argparse
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

import jsonschema

from engine_core.structured_output.grammar_error import GrammarError
from frontend import LLM, SamplingParams
from protocol.structured_output import StructuredOutputKind
from tests.engine_core.structured_output.languages import make_grammar, make_regex
from tests.engine_core.structured_output.schemas import make_schema, with_unsupported
from tests.engine_core.structured_output.test_compiler import compiled, random_text
from tests.engine_core.structured_output.tiny_model import write_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--regexes", type=int, default=200)
    parser.add_argument("--grammars", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=120)
    options = parser.parse_args()
    numbers = {"json": options.schemas, "regex": options.regexes, "grammar": options.grammars}
    cases = [
        (kind, seed, _asked(kind, seed))
        for kind, number in numbers.items()
        for seed in range(options.first, options.first + number)
    ]
    counts = {"not enforced": _refusals(range(options.first, options.first + options.schemas))}
    counts["drawn"] = _verdicts(
        (case, random_text(compiled(_KINDS[case[0]], case[2]), case[1])) for case in cases
    )
    print(counts, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (
            ("tiny", write_tiny_model(Path(folder))),
            (options.model, options.model),
        ):
            for speculative in (None, "ngram"):
                part = cases[speculative is not None :: 2]
                how = f"{name}, {speculative or 'no drafts'}"
                answers = _generated(str(model), speculative, part, options.max_tokens)
                counts[how] = _verdicts(answers)
                print(how, counts[how], flush=True)
    print(json.dumps(counts))
    if any(each["invalid"] for each in counts.values()):
        raise SystemExit(1)


_KINDS = {
    "json": StructuredOutputKind.JSON,
    "regex": StructuredOutputKind.REGEX,
    "grammar": StructuredOutputKind.GRAMMAR,
}


def _asked(kind, seed):
    match kind:
        case "json":
            return make_schema(seed)
        case "regex":
            return make_regex(seed)
    grammar = make_grammar(seed)
    return grammar.as_gbnf() if seed % 3 == 0 else grammar.as_lark()


def _generated(model, speculative, cases, max_tokens):
    with LLM(model=model, max_num_seqs=32, max_model_len=512, speculative=speculative) as llm:
        params = [
            SamplingParams(
                temperature=1.0, seed=seed, max_tokens=max_tokens, structured_outputs={kind: asked}
            )
            for kind, seed, asked in cases
        ]
        outputs = llm.generate(["An example: "] * len(cases), params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        (answer,) = output.outputs
        is_cut = answer.finish_reason == "length" or "Too many items (limit" in str(answer.detail)
        assert is_cut or answer.finish_reason == "stop", (case, answer.detail)
        yield case, None if is_cut else answer.text


def _verdicts(answers):
    counts = Counter()
    for (kind, seed, asked), text in answers:
        verdict = "cut" if text is None else "valid"
        if text is not None and (why := _fault(kind, seed, asked, text)):
            print(f"{kind} {seed}: {text!r:.200}: {why!s:.300}", flush=True)
            verdict = "invalid"
        counts[f"{kind} {verdict}"] += 1
        counts["invalid"] += verdict == "invalid"
    return counts


def _fault(kind, seed, asked, text):
    match kind:
        case "json":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            try:
                jsonschema.Draft202012Validator(asked, format_checker=checker).validate(
                    json.loads(text)
                )
            except (ValueError, jsonschema.ValidationError) as error:
                return error
        case "regex" if not re.fullmatch(asked, text):
            return asked
        case "grammar" if not make_grammar(seed).allows(text):
            return asked
    return None


def _refusals(seeds):
    counts = Counter()
    for seed in seeds:
        schema, keyword = with_unsupported(seed)
        try:
            compiled(StructuredOutputKind.JSON, schema)
            print("not refused:", seed, json.dumps(schema))
            counts["invalid"] += 1
        except GrammarError as error:
            counts["refused"] += 1
            if keyword not in str(error):
                print("not by name:", seed, keyword, error)
                counts["invalid"] += 1
    return counts


if __name__ == "__main__":
    main()
