import type { AdamParams } from '../contract.ts';

/** What training carries beside the weights; all flat, in the layout of the parameters. */
export interface OptimiserState {
  /** First moment. */
  m: Float32Array;
  /** Second moment. */
  v: Float32Array;
  /** Updates made so far. */
  step: number;
}

/** Euclidean norm, summed in float64. Not finite when an element is not, or is beyond 1e154. */
export function norm(gradient: Float32Array): number {
  let sum = 0;
  for (let i = 0; i < gradient.length; i++) sum += gradient[i]! * gradient[i]!;
  return Math.sqrt(sum);
}

/**
 * One AdamW update in place (Loshchilov and Hutter 2019: decay is decoupled and scaled by the learning
 * rate), after scaling the gradient and clipping its global norm. Arithmetic is float64, storage
 * float32. Defaults: beta1 0.9, beta2 0.95, eps 1e-8, no decay, no clip. Returns the norm of the scaled
 * gradient before the clip; when that is not finite nothing is changed.
 */
export function adamW(
  weights: Float32Array,
  gradient: Float32Array,
  state: OptimiserState,
  params: AdamParams,
): number {
  const { learningRate, beta1 = 0.9, beta2 = 0.95, eps = 1e-8 } = params;
  const { weightDecay = 0, gradClipNorm = 0, gradScale = 1 } = params;
  const gradNorm = norm(gradient) * gradScale;
  if (!Number.isFinite(gradNorm)) return gradNorm;
  const shrink = gradClipNorm > 0 && gradNorm > gradClipNorm ? gradClipNorm / gradNorm : 1;
  const scale = gradScale * shrink;
  state.step += 1;
  const stepSize = learningRate / (1 - beta1 ** state.step);
  const secondScale = 1 / Math.sqrt(1 - beta2 ** state.step);
  const keep = 1 - learningRate * weightDecay;
  const { m, v } = state;
  for (let i = 0; i < weights.length; i++) {
    const g = gradient[i]! * scale;
    const first = beta1 * m[i]! + (1 - beta1) * g;
    const second = beta2 * v[i]! + (1 - beta2) * g * g;
    m[i] = first;
    v[i] = second;
    weights[i] = weights[i]! * keep - (stepSize * first) / (Math.sqrt(second) * secondScale + eps);
  }
  return gradNorm;
}
