#!/usr/bin/env python3
"""Checks the Kubernetes manifests of `zerorun deploy` and of crates/zerorun/deploy/ against published schemas.

    scripts/check_manifests.py ZERORUN

Needs kubernetes-validate, kubeflow-trainer-api and kubeflow-training from PyPI. The parts are checked as follows:

- the Secret before the JobSet: with Kubernetes' JSON schemas from kubernetes-validate
- the complete JobSet (v1alpha2): with the models in kubeflow-trainer-api, which are generated from JobSet's own definition
- the Job in the JobSet, and each pod template: with Kubernetes' JSON schemas from kubernetes-validate, in which an unknown key is
  an error
- the MPIJob: `runPolicy` and the replicas with the v1 models in kubeflow-training. No package on PyPI has the v2beta1 models, so
  the names of the other keys are listed in this script.

The checks must also find the mistakes that this script plants. Exit status 1: something is wrong; the output lists the problems.
"""

import copy
import pathlib
import re
import subprocess
import sys

import kubernetes_validate
import yaml
from kubeflow.training import models as v1
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

# The keys of MPIJobSpec in v2beta1, from the documentation of the operator.
MPIJOB = {
    "slotsPerWorker": lambda value: isinstance(value, int) and value > 0,
    "mpiImplementation": lambda value: value in ("OpenMPI", "Intel", "MPICH"),
    "runPolicy": lambda value: isinstance(value, dict),
    "mpiReplicaSpecs": lambda value: set(value) == {"Launcher", "Worker"},
}


def differences(manifest, read, path=""):
    """Yields the differences between a manifest and the model that read it."""
    if isinstance(manifest, dict) and isinstance(read, dict):
        for key, value in manifest.items():
            if key not in read:
                yield f"{path}.{key} is not a known key"
            else:
                yield from differences(value, read[key], f"{path}.{key}")
    elif isinstance(manifest, list) and isinstance(read, list) and len(manifest) == len(read):
        for number, pair in enumerate(zip(manifest, read)):
            yield from differences(*pair, f"{path}[{number}]")
    elif manifest != read:
        yield f"{path} is {manifest!r}, read as {read!r}"


def schema_problems(document):
    """Yields the problems of a built-in Kubernetes object."""
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{document['kind']}: {'.'.join(str(part) for part in error.path)}: {error.message}"


def template_problems(template):
    """Yields the problems of a pod template."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template.get("metadata", {})}}
    yield from schema_problems({**pod, **{key: value for key, value in template.items() if key != "metadata"}})


def jobset_problems(document):
    try:
        read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(document)).to_dict()
    except ValueError as error:
        yield f"JobSet: {error}"
        return
    yield from (f"JobSet: {problem}" for problem in differences(document, read))
    for job in document["spec"]["replicatedJobs"]:
        yield from schema_problems({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]})
        yield from template_problems(job["template"]["spec"]["template"])


def model_problems(value, model):
    """Yields the problems of a part, using a model whose attributes are named differently from its keys."""
    keys = set(model.attribute_map.values())
    yield from (f"{key} is not a key of {model.__name__}" for key in value if key not in keys)
    try:
        model(**{name: value[key] for name, key in model.attribute_map.items() if key in value})
    except ValueError as error:
        yield f"{model.__name__}: {error}"


def mpijob_problems(document):
    spec = document["spec"]
    for key, value in spec.items():
        if key not in MPIJOB or not MPIJOB[key](value):
            yield f"MPIJob: spec.{key}: {value!r}"
    yield from model_problems(spec["runPolicy"], v1.KubeflowOrgV1RunPolicy)
    for replicas in spec["mpiReplicaSpecs"].values():
        yield from model_problems(replicas, v1.KubeflowOrgV1ReplicaSpec)
        yield from template_problems(replicas["template"])


def problems(document):
    kind = (document.get("apiVersion"), document.get("kind"))
    if kind == ("jobset.x-k8s.io/v1alpha2", "JobSet"):
        return list(jobset_problems(document))
    if kind == ("kubeflow.org/v2beta1", "MPIJob"):
        return list(mpijob_problems(document))
    if kind == ("v1", "Secret"):
        return list(schema_problems(document))
    return [f"{kind} is not a JobSet, an MPIJob or a Secret"]


def deploy_output(zerorun, cluster):
    words = [zerorun, "deploy", cluster, "--nodes", "2", "-n", "4", "--max_restarts", "3", "train", "--prompt", "it's: @NAME@ #"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def filled_template(path):
    """Returns the text of a file of deploy/ with its @PLACEHOLDERS@ filled in."""
    values = {"SECRET": "", "MAX_RESTARTS": "3", "NODES": "2", "RANKS": "4", "CORES": "4", "MEMORY": "16Gi", "COMMAND": '["zerorun"]', "MPIRUN": '["mpirun"]'}
    return re.sub(r"@([A-Z_]+)@", lambda word: values.get(word[1], word[1].lower().replace("_", "-")), path.read_text())


def plant(document, path, value):
    """Returns a copy of the document with a mistake planted at the path."""
    document = copy.deepcopy(document)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return document


JOB = ["spec", "replicatedJobs", 0, "template", "spec"]
WORKER = ["spec", "mpiReplicaSpecs", "Worker"]
MISTAKES = {
    "k8s": [
        (["spec", "failurePolicies"], {}),
        (["spec", "failurePolicy", "maxRestarts"], "three"),
        (["spec", "replicatedJobs", 0, "replica"], 1),
        (JOB + ["completionmode"], "Indexed"),
        (JOB + ["parallelism"], "two"),
        (JOB + ["template", "spec", "containers", 0, "comand"], []),
        (JOB + ["template", "spec", "containers", 0, "env", 0, "valueFrom", "secretKeyRef", "keys"], "secret"),
        (JOB + ["template", "spec", "terminationGracePeriodSeconds"], "60s"),
    ],
    "mpijob": [
        (["spec", "mpiImplementation"], "MPICH2"),
        (["spec", "slotPerWorker"], 2),
        (["spec", "runPolicy", "cleanPodPolicies"], "Running"),
        (WORKER + ["replica"], 2),
        (WORKER + ["template", "spec", "volumes", 0, "name"], 7),
        (WORKER + ["template", "spec", "containers", 0, "volumeMount"], []),
    ],
}

SECRET_MISTAKES = [(["stringdata"], {}), (["stringData", "secret"], 7), (["type"], 7)]


def main(zerorun):
    wrong = 0
    deploy = pathlib.Path(__file__).parent.parent / "crates/zerorun/deploy"
    for cluster, file in [("k8s", "jobset.yaml"), ("mpijob", "mpijob.yaml")]:
        *secrets, document = yaml.safe_load_all(deploy_output(zerorun, cluster))
        if cluster == "k8s":
            (secret,) = secrets
            for path, value in SECRET_MISTAKES:
                if not problems(plant(secret, path, value)):
                    print(f"Secret: {path} = {value!r} was planted and not found")
                    wrong += 1
            found = problems(secret)
            wrong += len(found)
            print(f"zerorun deploy {cluster}, Secret: {'right' if not found else '; '.join(found)}")
        for path, value in MISTAKES[cluster]:
            if not problems(plant(document, path, value)):
                print(f"{cluster}: {path} = {value!r} was planted and not found")
                wrong += 1
        texts = [(f"zerorun deploy {cluster}", document), (f"deploy/{file}", yaml.safe_load(filled_template(deploy / file)))]
        for name, manifest in texts:
            found = problems(manifest)
            wrong += len(found)
            print(f"{name}: {'right' if not found else '; '.join(found)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
