"""The fast weight layer (FWL): a layer after the last attention that learns while it reads.

Clark, Guu, Chang, Pasupat, Hinton & Norouzi 2022, "Meta-Learning Fast Weight Language Models" (arXiv 2212.02475).
With theta = (U, a, W, b and the layer normalisation's gain and shift),

    f_theta(h) = LayerNorm(ReLU^2(h U + a) W + b)
    L_t = -log p(x_{t+1} | f_theta(h_t))                             the loss with the trained ("slow") weights
    y_t = f_theta'(h_t),  theta' = theta - alpha (Delta + sum over S <= i < t of dL_i / dtheta)
    Delta <- gamma Delta + stopgrad(sum over S <= i <= T of dL_i / dtheta)    after a segment S..T

with a step size alpha and a decay gamma for each weight, and the running update Delta of past segments. The sum is over
i < t, as in the paper's Eq. 1. The paper's last formula prints i <= t, where y_t would know the token that it predicts.
Positions do not wait for each other: one backward pass gives the gradients of all L_i. A sum of gradients of U or W is
linear attention: its keys are the weight's inputs, its values the gradients of the weight's outputs (Eq. 2).

With gradients at "carried" weights, L_t is instead the loss with theta - alpha Delta, the weights at the start of the
segment, as in dynamic evaluation. Its gradient vanishes once something is learned, so that Delta can be kept longer.

layer.py has f and its gradients, update.py the state and the update of f by gradients, initialization.py the identity
at the start, model.py the language model.
Shapes: B batch, L tokens, M positions with a loss, D embed_dim, F hidden_dim.
"""

from fairseq_fwp.models.fast_weight_layer.layer import GRADIENTS_AT, FastWeightLayer
from fairseq_fwp.models.fast_weight_layer.update import FAST_WEIGHTS, FastWeightLayerState, Gradients
from fairseq_fwp.modules.attention.base import register_states

__all__ = ["FAST_WEIGHTS", "GRADIENTS_AT", "FastWeightLayer", "FastWeightLayerState", "Gradients"]

register_states(FastWeightLayerState, Gradients)
