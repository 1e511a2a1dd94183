import type { Loss, ModelConfig } from '../contract.ts';
import { decoderLayers, headLogits, parameterInputs, wholeRowAttention } from './decoder.ts';
import { clip, exp, minimum, mul, sub, sum } from './graph/basic.ts';
import { Graph, gradients, type Value } from './graph/graph.ts';
import { targetLogProb } from './graph/layers.ts';

interface Scored {
  graph: Graph;
  logprobs: Value;
  parameters: readonly Value[];
}

/**
 * Log-prob of every target. Inputs: the parameters, `tokens` and `targets` [count] (rows of equal
 * length, one after another, int32) and `mask` [length, length]. Output: `logprobs` [count].
 */
function scored(config: ModelConfig): Scored {
  const graph = new Graph();
  const parameters = parameterInputs(graph, config);
  const tokens = graph.input('tokens', ['count'], 'int32');
  const targets = graph.input('targets', ['count'], 'int32');
  const mask = graph.input('mask', ['length', 'length']);
  const attend = wholeRowAttention(graph, config, mask);
  const hidden = decoderLayers(graph, config, parameters, tokens, attend);
  const logits = headLogits(graph, config, parameters, hidden);
  const logprobs = targetLogProb(graph, logits, targets);
  graph.output(logprobs, 'logprobs');
  return { graph, logprobs, parameters: [...parameters.values()] };
}

export function scoringGraph(config: ModelConfig): Graph {
  return scored(config).graph;
}

/**
 * Forward, loss and backward in one graph. Beside the inputs of scoring: `weight` [count] (the weight
 * of cross_entropy, the advantage of the policy losses), for policy losses `sampled` [count] (log-prob
 * under the sampling policy) and for ppo the scalars `clipLow` and `clipHigh`. Outputs: `logprobs`,
 * `loss` (a sum) and `gradient`, flat in the order of the layout.
 */
export function trainingGraph(config: ModelConfig, kind: Loss['kind']): Graph {
  const { graph: g, logprobs, parameters } = scored(config);
  const weight = g.input('weight', ['count']);
  const objective = objectiveOf(g, kind, logprobs, weight);
  const loss = mul(g, sum(g, objective), g.scalar(-1));
  g.output(loss, 'loss');
  const flat = gradients(g, loss, parameters).map((gradient) => {
    const size = gradient.shape.reduce<number>((a, b) => a * (b as number), 1);
    return g.emit('Reshape', [gradient, g.shapeOf([size], 'reshape')], [size]);
  });
  const total = flat.reduce((a, b) => a + (b.shape[0] as number), 0);
  g.output(g.emit('Concat', flat, [total], { axis: 0 }), 'gradient');
  return g;
}

/** Per-token objective to maximise; the loss is minus its sum. */
function objectiveOf(g: Graph, kind: Loss['kind'], logprobs: Value, weight: Value): Value {
  switch (kind) {
    case 'cross_entropy':
      return mul(g, logprobs, weight);
    case 'importance_sampling':
      return mul(g, ratioOf(g, logprobs), weight);
    case 'ppo': {
      const ratio = ratioOf(g, logprobs);
      const clipped = clip(g, ratio, g.input('clipLow', []), g.input('clipHigh', []));
      return minimum(g, mul(g, ratio, weight), mul(g, clipped, weight));
    }
  }
}

function ratioOf(g: Graph, logprobs: Value): Value {
  return exp(g, sub(g, logprobs, g.input('sampled', ['count'])));
}
