"""PyTorch: transformers' model of a folder, eager or compiled.

serve_torch.py FOLDER DTYPE THREADS eager|compiled
"""

import sys

from serve import serve, timed, token_ids


def load():
    import torch
    from transformers import AutoModelForCausalLM

    folder, dtype, threads, how = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    # A decoding cache is kept in eager mode, as the others do; without one a compiled model is one graph.
    cached = how == "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    call = model if cached else torch.compile(model, dynamic=False)

    def prefill(tokens):
        ids = torch.tensor([token_ids(tokens, model.config.vocab_size)])
        return timed(lambda: call(ids, logits_to_keep=1, use_cache=cached))

    def decode(tokens):
        state = model(torch.tensor([[1]]), use_cache=True)

        def run():
            step = state
            for _ in range(tokens):
                token = step.logits[:, -1:].argmax(-1)
                step = model(token, past_key_values=step.past_key_values, use_cache=True)

        return timed(run)

    handlers = {"prefill": prefill, "decode": decode} if cached else {"prefill": prefill}
    return (
        f"torch {torch.__version__} {dtype} {how} {torch.backends.cpu.get_cpu_capability()}",
        handlers,
    )


serve(load)
