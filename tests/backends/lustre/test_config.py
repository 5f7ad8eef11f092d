"""Options from the environment: the ranks, as launchers set them."""

from penstock.backends.lustre import LustreConfig


def test_consistent_launcher_variables_are_used():
    for environment, ranks in [
        ({}, (1, 0)),
        ({"WORLD_SIZE": "8", "RANK": "3"}, (8, 3)),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "15"}, (16, 15)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, (4, 0)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, (2, 1)),
        ({"WORLD_SIZE": "8", "RANK": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (8, 1)),
        ({"WORLD_SIZE": "8"}, (1, 0)),
        ({"WORLD_SIZE": "8", "RANK": "8"}, (1, 0)),
        ({"WORLD_SIZE": "-8", "RANK": "x"}, (1, 0)),
        ({"WORLD_SIZE": "0", "RANK": "0"}, (1, 0)),
        ({"WORLD_SIZE": "²", "RANK": "0"}, (1, 0)),
    ]:
        assert LustreConfig(path="/run").ranks(environment) == ranks
