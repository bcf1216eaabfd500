"""An OpenAI-compatible server of a model in a folder, with ``echo`` and ``logprobs``, on loopback:
``logprob_server.py FOLDER PORT [FAILURES]``; the first so many requests fail as if it were busy.

For what vLLM gives and `transformers serve` does not; prompts are read as the tokenizer reads them.
"""

import sys

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from transformers import AutoModelForCausalLM, AutoTokenizer

app = FastAPI()


@app.get("/v1/models")
def models():
    return {"data": [{"id": "tiny"}]}


@app.post("/v1/completions")
def completions(body: dict):
    if app.state.failures > 0:
        app.state.failures -= 1
        raise HTTPException(503)
    ids = app.state.tokenizer(body["prompt"], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = app.state.model.generate(
            ids, max_new_tokens=body["max_tokens"], do_sample=False,
            pad_token_id=app.state.tokenizer.eos_token_id,
        )  # fmt: skip
        logp = app.state.model(out).logits.float().log_softmax(-1)[0]
    count, found = ids.shape[1], out[0].tolist()
    new = found[count:]
    choice = {"index": 0, "text": app.state.tokenizer.decode(new, skip_special_tokens=True)}
    choice["finish_reason"] = "stop" if new[-1] == app.state.tokenizer.eos_token_id else "length"
    if body.get("logprobs"):
        assert body["echo"]
        own = [None] + [logp[i - 1, found[i]].item() for i in range(1, len(found))]
        best = [None] + [{"best": logp[i - 1].max().item()} for i in range(1, len(found))]
        tokens = [app.state.tokenizer.decode(one) for one in found]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": own, "top_logprobs": best}
    usage = {"prompt_tokens": count, "completion_tokens": len(new)}
    return {"choices": [choice], "usage": usage}


if __name__ == "__main__":
    folder, port, *failures = sys.argv[1:]
    torch.set_num_threads(1)
    app.state.model = AutoModelForCausalLM.from_pretrained(folder).eval()
    app.state.tokenizer = AutoTokenizer.from_pretrained(folder)
    app.state.failures = int(failures[0]) if failures else 0
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
