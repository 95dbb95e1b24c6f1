"""Stock MLX: mlx_lm's model of a folder, as loaded or in fp32.

serve_mlx.py FOLDER loaded|fp32
"""

import sys

from serve import serve, timed, token_ids


def handlers_of(model, vocabulary) -> dict:
    """Prefill and greedy decoding of an mlx_lm model; of a prefill, the last position's logits."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    def last_logits(ids, cache):
        # As mlx_lm does it: all but the last id fill the cache, and their logits are never evaluated.
        if len(ids) > 1:
            model(mx.array(ids[:-1])[None], cache=cache)
            mx.eval([c.state for c in cache])
        logits = model(mx.array(ids[-1:])[None], cache=cache)
        mx.eval(logits)
        return logits

    def prefill(tokens):
        ids = token_ids(tokens, vocabulary)
        cache = make_prompt_cache(model)
        return timed(lambda: last_logits(ids, cache))

    def decode(tokens):
        cache = make_prompt_cache(model)
        logits = last_logits([1], cache)

        def run():
            token = mx.argmax(logits[:, -1], -1)
            for _ in range(tokens):
                token = mx.argmax(model(token[None], cache=cache)[:, -1], -1)
                mx.eval(token)

        return timed(run)

    return {"prefill": prefill, "decode": decode}


def load():
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.utils import load_model

    folder, dtype = sys.argv[1:]
    model, config = load_model(Path(folder))
    if dtype == "fp32":
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return f"mlx {mx.__version__} {dtype}", handlers_of(model, config["vocab_size"])


if __name__ == "__main__":
    serve(load)
