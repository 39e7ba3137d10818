"""`engine-core batch`: a JSONL file of requests to one of answers, by one engine or on Ray."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from tqdm import tqdm

from engine_core.errors import ConfigurationError, StartupError
from frontend.async_llm import AsyncLLM
from frontend.batch.answer_file import AnswerFile
from frontend.batch.answerer import Lines, OnAnswer
from frontend.batch.lines import BatchAnswer, BatchInput
from frontend.cluster.answering import answering, launch, names_of
from frontend.errors import EngineClientError, InvalidInput
from frontend.event_loop import run

_Shown = Parameter(show=True)
_Several = Parameter(show=True, negative="")


def batch(
    input_file: Annotated[Path, _Shown],
    output_file: Annotated[Path, _Shown],
    /,
    *engine_options: Annotated[str, Parameter(allow_leading_hyphen=True, show=True)],
    model: Annotated[str | None, _Shown] = None,
    address: Annotated[list[str] | None, _Several] = None,
    served_model_name: Annotated[list[str] | None, _Several] = None,
    replicas: Annotated[int | None, _Shown] = None,
    replica_cpus: Annotated[float, _Shown] = 1.0,
    replica_gpus: Annotated[float, _Shown] = 0.0,
) -> int:
    """Answer a JSONL file of requests. Run it again after an interruption: it goes on.

    Args:
        input_file: Lines as OpenAI's batch files have them, or bodies alone, or prompts.
        output_file: Gets an answer for each line, in their order, once all are there.
        engine_options: Other options are the daemon's (`engine-core --help-all`).
        model: A folder, file or known name, for engines that are started here.
        address: An engine that runs already; may be repeated.
        served_model_name: What lines may give as model, instead of --model; may be repeated.
        replicas: So many engines on Ray, of the extra `cluster`; default: one, without Ray.
        replica_cpus: Cores of each of them.
        replica_gpus: GPUs of each of them.
    """
    if (model is None) == (not address):
        raise ConfigurationError("give --model, or --address of running engines, not both")
    if address and (replicas is not None or engine_options):
        raise ConfigurationError("--replicas and the daemon's options need --model")
    if replicas is not None and replicas < 1:
        raise ConfigurationError(f"--replicas is {replicas}, it must be 1 or more")
    names = served_model_name or ()

    def answer_all(lines: Lines, on_answer: OnAnswer) -> None:
        if replicas is None:
            run(_answer_here(model, address, engine_options, names, lines, on_answer))
            return
        try:
            from frontend.cluster.offline import answer_on_ray
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"--replicas needs Ray ({error}); install it with `pip install "
                "'engine-core[cluster]'`, or omit --replicas"
            ) from None
        assert model is not None
        arguments = (model, engine_options, names)
        answer_on_ray(arguments, replicas, replica_cpus, replica_gpus, lines, on_answer)

    try:
        source = BatchInput.read(input_file)
        with AnswerFile(output_file, source, model or ", ".join(address or ())) as answers:
            num_before = answers.num_answered
            if not answers.is_complete:
                num_errors = _answer(answers, answer_all, len(source.lines))
                num_new = answers.num_answered - num_before
                new = f"{num_new} of this run, {num_errors} of them errors"
                _say(f"{answers.num_answered} answers in {output_file}, {new}")
            else:
                _say(f"all {num_before} answers are in {output_file} already")
    except InvalidInput as error:
        raise ConfigurationError(str(error)) from None
    except (EngineClientError, OSError) as error:
        raise StartupError(f"{error}; answers so far are kept: run this again to go on") from None
    return 0


def _answer(
    answers: AnswerFile, answer_all: Callable[[Lines, OnAnswer], None], num_lines: int
) -> int:
    """Returns how many answers of this run are errors."""
    num_errors = 0
    # a bar on a terminal only
    with tqdm(total=num_lines, initial=answers.num_answered, disable=None, unit=" answers") as bar:

        def on_answer(answer: BatchAnswer) -> None:
            nonlocal num_errors
            if answers.add(answer.custom_id, answer.line()):
                num_errors += answer.error is not None
                bar.update(1)

        if answers.num_answered < num_lines:
            answer_all(answers.unanswered(), on_answer)
    answers.finish()
    return num_errors


async def _answer_here(
    model: str | None,
    addresses: Sequence[str] | None,
    engine_options: Sequence[str],
    names: Sequence[str],
    lines: Lines,
    on_answer: OnAnswer,
) -> None:
    if model is None:
        llm = await AsyncLLM.connect(addresses, client_name="engine-core batch")
    else:
        llm = await launch(model, engine_options)
    async with answering(llm, names or names_of(model, llm)) as answerer:
        await answerer.answer_all(list(lines), on_answer)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
