"""The losses of distillation: divergences of a student's next-token distribution from a teacher's."""
