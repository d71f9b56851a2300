"""The inputs that a fast weight layer passes to its rule."""


def rule_inputs(layer, x, key_padding_mask=None):
    """Return q, k, v and gates of a layer in double precision: projected, mapped and normalised."""
    queries_keys, v, gates = layer.project(x)
    features = layer.feature_map(queries_keys)
    for normalization in layer.key_normalizations:
        features = normalization(features)
    return layer.arrange(features, v, gates, key_padding_mask)
