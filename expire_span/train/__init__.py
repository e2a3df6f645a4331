"""Training: the loop and run folder that all trainers share, and the trainers: supervised, actor-critic, distillation."""
