"""Modules over ragged tensors: `torch.nn` for batches of rows, as thin wrappers around the operators and `jit`.

linear       GroupedLinear: a weight for each group
tables       EmbeddingBag: pooled lookups, with an optimiser fused into the backward pass if wanted
rotary       RotaryEmbedding
attention    MultiheadAttention, with torch's parameters
transformer  TransformerEncoderLayer, with torch's parameters
hstu         HSTU: attention without a softmax, gated
experts      MoE: top-k routing, one grouped product per layer of the experts, no token dropped
pooling      one vector for each row: sum, mean, max, attention

`Linear`, `LayerNorm`, `RMSNorm` and `Embedding` are torch's own classes, which take ragged tensors as they are; so do its
activations, dropouts and losses.
"""

from torch.nn import Embedding, LayerNorm, Linear, RMSNorm

from serrate.nn.attention import MultiheadAttention
from serrate.nn.experts import MoE, MoEOutput
from serrate.nn.hstu import HSTU
from serrate.nn.linear import GroupedLinear
from serrate.nn.pooling import AttentionPool, MaxPool, MeanPool, SumPool
from serrate.nn.rotary import RotaryEmbedding
from serrate.nn.tables import EmbeddingBag
from serrate.nn.transformer import TransformerEncoderLayer

__all__ = [
    "HSTU",
    "AttentionPool",
    "Embedding",
    "EmbeddingBag",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "MaxPool",
    "MeanPool",
    "MoE",
    "MoEOutput",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SumPool",
    "TransformerEncoderLayer",
]
