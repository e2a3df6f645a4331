"""The paper's analyses of a trained model of text: what lives long, what spans hang on, what a shorter memory costs."""
