"""Stream tokens through a decoder one by one: the bytes held stay constant, however long the stream.

python examples/02_stream.py
"""

import torch

from expire_span import Decoder, DecoderConfig, ExpireSpanConfig

torch.manual_seed(0)
mixer = ExpireSpanConfig(max_span=64, ramp=8, initial_span=0.5)  # untrained: every memory is given 32 steps
decoder = Decoder(DecoderConfig.modern(vocab=64, dim=64, layers=2, heads=2, ff_dim=64, mixer=mixer)).eval()

state, held = decoder.initial_state(batch=1), []
with torch.no_grad():
    for step in range(600):
        token = torch.randint(64, (1, 1))
        logits, state, aux = decoder(token, state)
        held.append(aux.bytes_held)
        if step % 100 == 99:
            print(f"step {step + 1:4d}: {held[-1]:6d} bytes held, {aux.live.mean():.0f} memories alive in each layer")

one_memory = 2 * 64 * 4 * 2  # key and value, 64 floats each, in 2 layers
print(f"the most ever held: {max(held)} bytes; a model that never forgets would hold {600 * one_memory}")
assert max(held[300:]) <= max(held[:300]), "memory must not grow with the stream"
