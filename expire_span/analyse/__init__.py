"""The paper's analyses of a trained model of text: what lives long, what spans depend on, what a shorter memory costs."""
