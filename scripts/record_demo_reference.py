"""Record what transformers answers on the demo model: writes onebudget/models/demo_prompts.json.

    .venv/bin/python scripts/record_demo_reference.py              record the prompts below
    .venv/bin/python scripts/record_demo_reference.py --try TEXT   show one prompt's answers and margins, write nothing

A prompt is worth keeping when the margin between the best and the second logit stays wide along both paths, so that
another correct implementation, with its sums in another order, must arrive at the same ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from onebudget.models.demo import SMOLLM2, ensure_demo_model

TARGET = Path(__file__).parents[1] / "onebudget" / "models" / "demo_prompts.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_TOKENS = 48
PROMPTS: tuple[str, ...] = (
    "What is the capital of France?",
    "List the months of the year.",
    "Write an email to my boss to ask for a day off.",
    "What is the largest ocean on Earth?",
    "Write a for loop in Python.",
    "How many hours are there in a day?",
    "Count from 1 to 20.",
    "What is the capital of Japan?",
)


class Recorder:
    def __init__(self) -> None:
        folder = ensure_demo_model()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.models = {
            name: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for name, dtype in DTYPES.items()
        }

    def prompt(self, text: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        greedy = {name: self.greedy(model, ids) for name, model in self.models.items()}
        return {
            "messages": messages,
            "max_tokens": MAX_TOKENS,
            "prompt_token_ids": ids,
            "text": self.tokenizer.decode(greedy["float32"]["token_ids"], skip_special_tokens=True),
            "greedy": greedy,
        }

    def greedy(self, model: Any, ids: list[int]) -> dict[str, Any]:
        prompt = torch.tensor([ids])
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best_two = torch.cat(output.logits).float().topk(2).values
        margins = best_two[:, 0] - best_two[:, 1]
        return {
            "token_ids": output.sequences[0, len(ids) :].tolist(),
            "min_margin": round(margins.min().item(), 4),
        }


def made_with() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "weights_sha256": SMOLLM2.sha256}


def dump(document: dict[str, Any]) -> str:
    """Indented JSON with each list of numbers on one line."""
    lists: list[str] = []

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hide(item) for key, item in value.items()}
        if isinstance(value, list) and value and isinstance(value[0], int):
            lists.append(json.dumps(value))
            return f"<list {len(lists) - 1}>"
        return [hide(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(hide(document), indent=1, ensure_ascii=False)
    for number, line in enumerate(lists):
        text = text.replace(f'"<list {number}>"', line)
    return text + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="attempts", metavar="TEXT", action="append", default=[])
    attempts = parser.parse_args().attempts
    recorder = Recorder()
    recorded = []
    for text in attempts or PROMPTS:
        entry = recorder.prompt(text)
        recorded.append(entry)
        margins = " ".join(f"{name} {answer['min_margin']}" for name, answer in entry["greedy"].items())
        print(f"{margins} | {text} | {entry['text']!r}")
    if not attempts:
        TARGET.write_text(dump({"made_with": made_with(), "prompts": recorded}), encoding="utf-8")


if __name__ == "__main__":
    main()
