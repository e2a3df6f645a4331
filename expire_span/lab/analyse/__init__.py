"""The paper's analyses of a model trained on text: which tokens live long, what spans depend on, what shorter memories cost."""
