"""Components of NeMo Agent Toolkit for the tests: a tool, a workflow that calls it, and evaluators of several moods."""

import asyncio
from pathlib import Path

from nat.builder.builder import Builder, EvalBuilder
from nat.builder.context import Context
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import FunctionRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import (
    IntermediateStepPayload,
    IntermediateStepType,
    StreamEventData,
    TokenUsageBaseModel,
    UsageInfo,
)
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator


def note(word: str) -> None:
    """Tell the test what happens."""
    with Path("events.txt").open("a") as file:
        file.write(f"{word}\n")


class PowerConfig(FunctionBaseConfig, name="power"):
    exponent: int = 2


@register_function(config_type=PowerConfig)
async def power(config: PowerConfig, builder: Builder):
    async def run(number: int) -> int:
        return number**config.exponent

    yield FunctionInfo.from_fn(run, description="raise a number to a power")


class AgentConfig(FunctionBaseConfig, name="powers_agent"):
    tool: FunctionRef
    model_name: str = "none"


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    tool = await builder.get_function(config.tool)
    note("open")

    async def run(question: str) -> str:
        note("call")
        if "wait" in question:
            await asyncio.Event().wait()
        # What a framework's callback reports of a model call.
        tokens = TokenUsageBaseModel(prompt_tokens=10, completion_tokens=3, total_tokens=13)
        steps = Context.get().intermediate_step_manager
        for kind in (IntermediateStepType.LLM_START, IntermediateStepType.LLM_END):
            steps.push_intermediate_step(
                IntermediateStepPayload(
                    UUID=f"llm-{question}",
                    event_type=kind,
                    name=config.model_name,
                    data=StreamEventData(input=question, output="I will compute it"),
                    usage_info=UsageInfo(token_usage=tokens),
                )
            )
        number = int(question.split()[-1])
        return f"the answer is {await tool.ainvoke(number, to_type=int)}"

    try:
        yield FunctionInfo.from_fn(run, description="answer questions about powers")
    finally:
        note("close")


class ContainsConfig(EvaluatorBaseConfig, name="contains"):
    """The answer contains the expected one."""

    llm_name: str | None = None


class MoodConfig(EvaluatorBaseConfig, name="mood"):
    """An evaluator that does what it is told."""

    mood: str


class Contains(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        found = str(item.expected_output_obj) in str(item.output_obj)
        steps = [step.event_type.value for step in item.trajectory]
        return EvalOutputItem(id=item.id, score=float(found), reasoning={"steps": steps, "asked": item.input_obj})


class Mood(BaseEvaluator):
    def __init__(self, mood: str) -> None:
        super().__init__()
        self.mood = mood

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        if self.mood == "raises":
            raise ConnectionError("the judge is down")
        if self.mood == "reports":
            return EvalOutputItem(id=item.id, score=0.0, reasoning="", error="the judge is down")
        if self.mood == "hides":
            return EvalOutputItem(id=item.id, score=0.0, reasoning={"error": "Evaluator error: the judge is down"})
        return EvalOutputItem(id=item.id, score=float(self.mood), reasoning="as it was told")


@register_evaluator(config_type=ContainsConfig)
async def contains(config: ContainsConfig, builder: EvalBuilder):
    evaluator = Contains(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="contains")


@register_evaluator(config_type=MoodConfig)
async def mood(config: MoodConfig, builder: EvalBuilder):
    yield EvaluatorInfo(config=config, evaluate_fn=Mood(config.mood).evaluate, description="mood")
