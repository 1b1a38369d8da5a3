"""Fine-tune a Hugging Face model with low-rank adapters on a chat, and ask it.

It shows the chat template of a tokenizer applied to records with `messages`, labels that count in the answers only,
a frozen model that rests sharded over the ranks, and adapters written as the `peft` package writes them.

    torchrun --nproc-per-node 2 examples/finetune_lora.py
    torchrun --nproc-per-node 2 examples/finetune_lora.py --model models/Qwen3-0.6B --data chat.jsonl --lr 1e-4

Without --model it starts from a tiny Llama with random weights and a tokenizer trained on the chat below, so nothing is
downloaded. Without --data it learns these answers. A record is one line: {"messages": [{"role": ..., "content": ...}]}.
It needs `pip install "atoll[hf]"`, and prints

    trains 17408 of 147264 parameters
    step   1  loss 7.1927  gradient norm 3.135
    step  20  loss 0.0507  gradient norm 0.117
    ...
    user: Who keeps the parameters whole?
    assistant: Nobody: each rank keeps a shard.
    adapters in runs/finetune/adapters
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import atoll

CHAT = {
    "What is an island?": "A group of ranks that fast links join.",
    "Who keeps the parameters whole?": "Nobody: each rank keeps a shard.",
    "When are they gathered?": "Just before a block needs them.",
    "What crosses the slow link?": "Only the adapters.",
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
MICROBATCH = 2
IGNORED = -100  # a label that does not count

# peft reads an attribute that transformers has renamed.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)


# ---- data


def read(path: Path | None) -> list[list[dict[str, str]]]:
    """The conversations of a JSONL file, or the ones above."""
    if path is not None:
        return [json.loads(line)["messages"] for line in path.read_text().splitlines() if line.strip()]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in CHAT.items()
    ]


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels: the same ids in the assistant's answers, -100 outside of them.

    Where an answer begins and ends is found in the text, which the template gives for the messages before it with the
    assistant's turn opened, and for those up to it.
    """

    def render(count: int, *, is_open: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=is_open)

    whole = render(len(messages))
    answers = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, behind = render(at, is_open=True), render(at + 1)
        if not (behind.startswith(before) and whole.startswith(behind)):
            raise ValueError("this chat template rewrites earlier turns; give each answer as a record of its own")
        answers.append(range(len(before), len(behind)))

    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
    labels = [
        token if any(start in answer for answer in answers) else IGNORED
        for token, start in zip(ids, starts, strict=True)
    ]
    return ids, labels


def collate(samples: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Samples padded to the longest: ids, labels and the mask of what is there, each [B, S]."""
    length = max(len(ids) for ids, _ in samples)

    def pad(rows: list[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (length - len(row)) for row in rows])

    return {
        "input_ids": pad([ids for ids, _ in samples], 0),
        "labels": pad([labels for _, labels in samples], IGNORED),
        "attention_mask": pad([[1] * len(ids) for ids, _ in samples], 0),
    }


# ---- model


def train_tokenizer(chat: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template, trained on the chat."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((message["content"] for each in chat for message in each), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=TEMPLATE)


def make_base(folder: Path, chat: list[list[dict[str, str]]]) -> None:
    """A tiny Llama with random weights and its tokenizer, in place of a downloaded model."""
    tokenizer = train_tokenizer(chat)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,  # logits large enough for a random head that stays as it is
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def adapters() -> peft.LoraConfig:
    """Low-rank adapters on every linear layer but the head."""
    return peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def build(base: Path, world: int, *, lr: float) -> atoll.Engine:
    """The frozen model sharded over the ranks of the group (I), adapters whole in optimizer and gradient (N).

    Each rank reads its own shards from the safetensors of the folder.
    """
    with torch.device("meta"):
        model = peft.get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)), adapters())
    schedule = atoll.schedule("1f1b", ranks=1, microbatches=1)
    plan = atoll.Plan(atoll.MeshShape(intra=world), atoll.Layout("ING"), schedule, microbatch=MICROBATCH)
    return atoll.Engine(
        model,
        plan,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=lr),
        clip=1.0,
        weights=base,
        labels="unshifted",  # as transformers has them: the engine shifts
    )


def save(engine: atoll.Engine, base: Path, folder: Path) -> None:
    """The adapters as `peft` writes them, by rank 0. Every rank calls it, since each has a part of them."""
    with engine.full_parameters("*lora_*") as values:
        if engine.place.rank != 0:
            return
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapters())
        named = {f"base_model.model.{name}": value for name, value in values.items()}
        _, unexpected = model.load_state_dict(named, strict=False)
        assert not unexpected, unexpected
        model.save_pretrained(folder)


def ask(base: Path, folder: Path, question: str) -> str:
    """The folder, loaded by transformers and peft without Atoll."""
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    ids = inputs["input_ids"]
    found = model.generate(
        input_ids=ids,
        attention_mask=inputs["attention_mask"],
        max_new_tokens=32,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


# ---- the run


def join() -> int:
    """Meet the other ranks of torchrun, if it started this process; how many there are."""
    if not dist.is_torchelastic_launched():
        return 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_world_size()


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder with config.json, safetensors and a tokenizer")
    parser.add_argument("--data", type=Path, help="a JSONL file of records with messages")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main() -> None:
    """One rank of the run, or the only one."""
    given = options()
    world = join()
    rank = dist.get_rank() if world > 1 else 0
    chat = read(given.data)
    base = given.model or given.out / "base"
    if rank == 0 and given.model is None:
        make_base(base, chat)
    if world > 1:
        dist.barrier()  # the folder is whole

    tokenizer = AutoTokenizer.from_pretrained(base)
    samples = [encode(tokenizer, messages) for messages in chat]
    engine = build(base, world, lr=given.lr)
    if rank == 0:
        sizes = [(each.numel(), each.requires_grad) for each in engine.model.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        print(f"trains {trained} of {sum(size for size, _ in sizes)} parameters")

    order = itertools.cycle(samples)
    for step in range(1, given.steps + 1):
        everybody = collate([next(order) for _ in range(MICROBATCH * world)])
        mine = slice(rank * MICROBATCH, (rank + 1) * MICROBATCH)
        out = engine.step({name: values[mine] for name, values in everybody.items()})
        if rank == 0 and (step == 1 or step % 20 == 0 or step == given.steps):
            print(f"step {step:3}  loss {out.loss:.4f}  gradient norm {out.grad_norm:.3f}")

    save(engine, base, given.out / "adapters")
    engine.close()
    if rank == 0:
        question = chat[1 % len(chat)][0]["content"]
        print(f"user: {question}\nassistant: {ask(base, given.out / 'adapters', question)}")
        print(f"adapters in {given.out / 'adapters'}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
