"""The settings that decide what a model computes, beside its sizes."""

CHOICES = {
    "positions": ("learned", "rope"),
    "token_shifts": (0, 3),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "relu2", "swiglu"),
    "bias": (False, True),
    "tied": (False, True),
    "qk_norm": (False, True),
    "logit_softcap": (0.0, 15.0),
}
