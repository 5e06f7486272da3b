
/tmp/tmpclhrlm7p.o:     file format elf64-x86-64


Disassembly of section .ltext:

0000000000000000 <k0_lambda_add0>:
   0:	movabs $0x0,%rax
   a:	vbroadcastss (%rax),%zmm0
  10:	cmp    %r8,%rcx
  13:	jge    42 <k0_lambda_add0+0x42>
  15:	data16 cs nopw 0x0(%rax,%rax,1)
  20:	vaddps (%rdi),%zmm0,%zmm1
  26:	vaddps 0x40(%rdi),%zmm0,%zmm2
  2d:	inc    %rcx
  30:	vmovups %zmm1,(%rsi)
  36:	vmovups %zmm2,0x40(%rsi)
  3d:	cmp    %r8,%rcx
  40:	jl     20 <k0_lambda_add0+0x20>
  42:	vzeroupper
  45:	ret
  46:	cs nopw 0x0(%rax,%rax,1)

0000000000000050 <k1_body>:
  50:	push   %rbp
  51:	push   %r15
  53:	push   %r14
  55:	push   %r13
  57:	push   %r12
  59:	push   %rbx
  5a:	sub    $0x78,%rsp
  5e:	movabs $0x0,%rax
  68:	mov    %rcx,%r14
  6b:	shl    $0x5,%r14
  6f:	movabs $0x0,%r12
  79:	mov    %r8,%rbx
  7c:	mov    %rcx,%rbp
  7f:	mov    %rdx,%r15
  82:	mov    %rdi,%r13
  85:	mov    %rsi,0x8(%rsp)
  8a:	vbroadcastss (%rax),%ymm0
  8f:	movabs $0x0,%rax
  99:	vbroadcastss (%rax),%ymm2
  9e:	movabs $0x0,%rax
  a8:	vbroadcastss (%rax),%ymm1
  ad:	vmovups %ymm0,0x50(%rsp)
  b3:	vmovups %ymm2,0x30(%rsp)
  b9:	vmovups %ymm1,0x10(%rsp)
  bf:	jmp    ed <k1_body+0x9d>
  c1:	data16 data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)
  d0:	vmovups 0x0(%r13,%r14,1),%ymm0
  d7:	mov    0x8(%rsp),%rax
  dc:	inc    %rbp
  df:	vaddps %ymm0,%ymm0,%ymm0
  e3:	vmovups %ymm0,(%rax,%r14,1)
  e9:	add    $0x20,%r14
  ed:	cmp    %rbx,%rbp
  f0:	jge    1e2 <k1_body+0x192>
  f6:	vmovups 0x0(%r13,%r14,1),%ymm0
  fd:	vmovups 0x50(%rsp),%ymm1
 103:	vmovdqu 0x10(%rsp),%ymm2
 109:	xor    %eax,%eax
 10b:	vcmpltps 0x30(%rsp),%ymm0,%k0
 117:	vmaxps %ymm0,%ymm1,%ymm1
 11b:	vextractf128 $0x1,%ymm1,%xmm0
 121:	vcmpunordps %ymm1,%ymm1,%k1
 128:	kortestb %k0,%k0
 12c:	setae  %al
 12f:	vmaxps %ymm0,%ymm1,%ymm0
 133:	vpternlogd $0xe0,%ymm2,%ymm1,%ymm0
 13a:	vmovaps %ymm1,%ymm0{%k1}
 140:	vshufpd $0x1,%xmm0,%xmm0,%xmm1
 145:	vcmpunordps %ymm0,%ymm0,%k1
 14c:	vmaxps %xmm1,%xmm0,%xmm1
 150:	vpternlogd $0xe0,%ymm2,%ymm0,%ymm1
 157:	vmovaps %ymm0,%ymm1{%k1}
 15d:	vmovshdup %xmm1,%xmm0
 161:	vcmpunordss %xmm1,%xmm1,%k1
 168:	vmaxss %xmm0,%xmm1,%xmm0
 16c:	vpternlogd $0xa8,%xmm0,%xmm1,%xmm2
 173:	vmovss %xmm1,%xmm2,%xmm2{%k1}
 179:	vmovss %xmm2,0x40(%r15)
 17f:	mov    %eax,(%r15)
 182:	jb     d0 <k1_body+0x80>
 188:	vmovss 0x40(%r15),%xmm0
 18e:	mov    $0x3,%edi
 193:	xor    %esi,%esi
 195:	mov    %r15,%rdx
 198:	vmovss %xmm0,(%r15)
 19d:	movl   $0x41c40000,0xc0(%r15)
 1a8:	mov    %ebp,0x80(%r15)
 1af:	vzeroupper
 1b2:	call   *%r12
 1b5:	mov    $0x3,%edi
 1ba:	mov    $0x1,%esi
 1bf:	lea    0xc0(%r15),%rdx
 1c6:	call   *%r12
 1c9:	mov    $0x3,%edi
 1ce:	mov    $0x2,%esi
 1d3:	lea    0x80(%r15),%rdx
 1da:	call   *%r12
 1dd:	jmp    d0 <k1_body+0x80>
 1e2:	add    $0x78,%rsp
 1e6:	pop    %rbx
 1e7:	pop    %r12
 1e9:	pop    %r13
 1eb:	pop    %r14
 1ed:	pop    %r15
 1ef:	pop    %rbp
 1f0:	vzeroupper
 1f3:	ret
 1f4:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000200 <k2_lambda_sub0>:
 200:	movabs $0x0,%rax
 20a:	vbroadcastss (%rax),%zmm0
 210:	cmp    %r8,%rcx
 213:	jge    24e <k2_lambda_sub0+0x4e>
 215:	data16 cs nopw 0x0(%rax,%rax,1)
 220:	vmovups (%rdi),%zmm1
 226:	vmovups 0x40(%rdi),%zmm2
 22d:	inc    %rcx
 230:	vsubps %zmm0,%zmm1,%zmm1
 236:	vmovups %zmm1,(%rsi)
 23c:	vsubps %zmm0,%zmm2,%zmm1
 242:	vmovups %zmm1,0x40(%rsi)
 249:	cmp    %r8,%rcx
 24c:	jl     220 <k2_lambda_sub0+0x20>
 24e:	vzeroupper
 251:	ret
 252:	data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000260 <pbk_task0>:
 260:	push   %rax
 261:	shl    $0x6,%rcx
 265:	mov    %rsi,%rax
 268:	mov    (%rdi),%r10
 26b:	mov    0x8(%rdi),%rsi
 26f:	add    0x10(%rdi),%rcx
 273:	movabs $0x0,%r9
 27d:	mov    %rdx,%r8
 280:	mov    %rcx,%rdx
 283:	mov    %r10,%rdi
 286:	mov    %rax,%rcx
 289:	call   *%r9
 28c:	pop    %rax
 28d:	ret
 28e:	xchg   %ax,%ax

0000000000000290 <pbk_task1>:
 290:	push   %rax
 291:	shl    $0x8,%rcx
 295:	mov    %rsi,%rax
 298:	mov    (%rdi),%r10
 29b:	mov    0x8(%rdi),%rsi
 29f:	add    0x10(%rdi),%rcx
 2a3:	movabs $0x0,%r9
 2ad:	mov    %rdx,%r8
 2b0:	mov    %rcx,%rdx
 2b3:	mov    %r10,%rdi
 2b6:	mov    %rax,%rcx
 2b9:	call   *%r9
 2bc:	pop    %rax
 2bd:	ret
 2be:	xchg   %ax,%ax

00000000000002c0 <pbk_task2>:
 2c0:	push   %rax
 2c1:	shl    $0x6,%rcx
 2c5:	mov    %rsi,%rax
 2c8:	mov    (%rdi),%r10
 2cb:	mov    0x8(%rdi),%rsi
 2cf:	add    0x10(%rdi),%rcx
 2d3:	movabs $0x0,%r9
 2dd:	mov    %rdx,%r8
 2e0:	mov    %rcx,%rdx
 2e3:	mov    %r10,%rdi
 2e6:	mov    %rax,%rcx
 2e9:	call   *%r9
 2ec:	pop    %rax
 2ed:	ret
 2ee:	xchg   %ax,%ax

00000000000002f0 <pbk_main>:
 2f0:	push   %r15
 2f2:	push   %r14
 2f4:	push   %rbx
 2f5:	sub    $0x50,%rsp
 2f9:	mov    (%rsi),%rax
 2fc:	mov    %rdx,%rbx
 2ff:	lea    0x100(%rdx),%r15
 306:	lea    0x38(%rsp),%rdi
 30b:	mov    %rsi,%r14
 30e:	xor    %esi,%esi
 310:	xor    %ecx,%ecx
 312:	mov    %rax,0x38(%rsp)
 317:	mov    %rdx,0x40(%rsp)
 31c:	movabs $0x0,%rax
 326:	mov    $0x1,%edx
 32b:	mov    %r15,0x48(%rsp)
 330:	call   *%rax
 332:	mov    %rbx,0x20(%rsp)
 337:	sub    $0xffffffffffffff80,%rbx
 33b:	movabs $0x0,%rax
 345:	lea    0x20(%rsp),%rdi
 34a:	mov    $0x4,%edx
 34f:	xor    %esi,%esi
 351:	xor    %ecx,%ecx
 353:	mov    %rbx,0x28(%rsp)
 358:	mov    %r15,0x30(%rsp)
 35d:	call   *%rax
 35f:	mov    0x8(%r14),%rax
 363:	mov    %rbx,0x8(%rsp)
 368:	lea    0x8(%rsp),%rdi
 36d:	mov    $0x1,%edx
 372:	xor    %esi,%esi
 374:	xor    %ecx,%ecx
 376:	mov    %rax,0x10(%rsp)
 37b:	movabs $0x0,%rax
 385:	mov    %r15,0x18(%rsp)
 38a:	call   *%rax
 38c:	add    $0x50,%rsp
 390:	pop    %rbx
 391:	pop    %r14
 393:	pop    %r15
 395:	ret
 396:	cs nopw 0x0(%rax,%rax,1)

00000000000003a0 <pbk_run>:
 3a0:	push   %r15
 3a2:	push   %r14
 3a4:	push   %r13
 3a6:	push   %r12
 3a8:	push   %rbx
 3a9:	sub    $0x10,%rsp
 3ad:	mov    %rsi,%rbx
 3b0:	movabs $0x0,%r15
 3ba:	movabs $0x0,%rax
 3c4:	lea    0x8(%rsp),%rcx
 3c9:	mov    $0x1000,%esi
 3ce:	mov    $0x1000,%edx
 3d3:	mov    %rdi,%r14
 3d6:	mov    %r15,%rdi
 3d9:	call   *%rax
 3db:	mov    0x8(%rsp),%r13
 3e0:	mov    %rax,%r12
 3e3:	movabs $0x0,%rax
 3ed:	mov    %r14,%rdi
 3f0:	mov    %rbx,%rsi
 3f3:	mov    %r13,%rdx
 3f6:	call   *%rax
 3f8:	movabs $0x0,%rax
 402:	mov    %r15,%rdi
 405:	mov    %r13,%rsi
 408:	mov    %r12,%rdx
 40b:	call   *%rax
 40d:	add    $0x10,%rsp
 411:	pop    %rbx
 412:	pop    %r12
 414:	pop    %r13
 416:	pop    %r14
 418:	pop    %r15
 41a:	ret
 41b:	nopl   0x0(%rax,%rax,1)

0000000000000420 <pbk_call>:
 420:	push   %rax
 421:	movabs $0x0,%rax
 42b:	mov    %rdi,%rsi
 42e:	xor    %edi,%edi
 430:	call   *%rax
 432:	pop    %rax
 433:	ret
 434:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000440 <pbk_handler>:
 440:	mov    0x8(%rdi),%rax
 444:	test   %rax,%rax
 447:	je     478 <pbk_handler+0x38>
 449:	cmpl   $0x1,0x8(%rax)
 44d:	sete   %cl
 450:	test   %cl,%cl
 452:	je     47e <pbk_handler+0x3e>
 454:	mov    0x18(%rax),%rax
 458:	movabs $0x300000000,%rcx
 462:	mov    %rcx,0x18(%rax)
 466:	movl   $0x0,0x20(%rax)
 46d:	movq   $0x0,0x28(%rax)
 475:	xor    %eax,%eax
 477:	ret
 478:	xor    %ecx,%ecx
 47a:	test   %cl,%cl
 47c:	jne    454 <pbk_handler+0x14>
 47e:	sub    $0x18,%rsp
 482:	mov    0x48(%rdi),%rax
 486:	mov    0x70(%rdi),%rcx
 48a:	lea    0x8(%rsp),%rsi
 48f:	mov    (%rax),%rax
 492:	mov    0x18(%rax),%rax
 496:	mov    %rax,0x8(%rsp)
 49b:	mov    (%rcx),%rax
 49e:	mov    0x18(%rax),%rax
 4a2:	mov    %rax,0x10(%rsp)
 4a7:	movabs $0x0,%rax
 4b1:	call   *%rax
 4b3:	add    $0x18,%rsp
 4b7:	xor    %eax,%eax
 4b9:	ret
 4ba:	nopw   0x0(%rax,%rax,1)

00000000000004c0 <_mlir_k0_lambda_add0>:
 4c0:	push   %rax
 4c1:	mov    (%rdi),%rax
 4c4:	mov    0x10(%rdi),%rdx
 4c8:	mov    0x8(%rdi),%rcx
 4cc:	mov    0x18(%rdi),%r8
 4d0:	mov    0x20(%rdi),%rdi
 4d4:	movabs $0x0,%r9
 4de:	mov    (%rcx),%rsi
 4e1:	mov    (%r8),%rcx
 4e4:	mov    (%rax),%rax
 4e7:	mov    (%rdi),%r8
 4ea:	mov    (%rdx),%rdx
 4ed:	mov    %rax,%rdi
 4f0:	call   *%r9
 4f3:	pop    %rax
 4f4:	ret
 4f5:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000500 <_mlir_k1_body>:
 500:	push   %rax
 501:	mov    (%rdi),%rax
 504:	mov    0x10(%rdi),%rdx
 508:	mov    0x8(%rdi),%rcx
 50c:	mov    0x18(%rdi),%r8
 510:	mov    0x20(%rdi),%rdi
 514:	movabs $0x0,%r9
 51e:	mov    (%rcx),%rsi
 521:	mov    (%r8),%rcx
 524:	mov    (%rax),%rax
 527:	mov    (%rdi),%r8
 52a:	mov    (%rdx),%rdx
 52d:	mov    %rax,%rdi
 530:	call   *%r9
 533:	pop    %rax
 534:	ret
 535:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000540 <_mlir_k2_lambda_sub0>:
 540:	push   %rax
 541:	mov    (%rdi),%rax
 544:	mov    0x10(%rdi),%rdx
 548:	mov    0x8(%rdi),%rcx
 54c:	mov    0x18(%rdi),%r8
 550:	mov    0x20(%rdi),%rdi
 554:	movabs $0x0,%r9
 55e:	mov    (%rcx),%rsi
 561:	mov    (%r8),%rcx
 564:	mov    (%rax),%rax
 567:	mov    (%rdi),%r8
 56a:	mov    (%rdx),%rdx
 56d:	mov    %rax,%rdi
 570:	call   *%r9
 573:	pop    %rax
 574:	ret
 575:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000580 <_mlir_pbk_task0>:
 580:	push   %rax
 581:	mov    (%rdi),%rax
 584:	mov    0x10(%rdi),%rdx
 588:	mov    0x8(%rdi),%rcx
 58c:	mov    0x18(%rdi),%rdi
 590:	movabs $0x0,%r8
 59a:	mov    (%rcx),%rsi
 59d:	mov    (%rax),%rax
 5a0:	mov    (%rdi),%rcx
 5a3:	mov    (%rdx),%rdx
 5a6:	mov    %rax,%rdi
 5a9:	call   *%r8
 5ac:	pop    %rax
 5ad:	ret
 5ae:	xchg   %ax,%ax

00000000000005b0 <_mlir_pbk_task1>:
 5b0:	push   %rax
 5b1:	mov    (%rdi),%rax
 5b4:	mov    0x10(%rdi),%rdx
 5b8:	mov    0x8(%rdi),%rcx
 5bc:	mov    0x18(%rdi),%rdi
 5c0:	movabs $0x0,%r8
 5ca:	mov    (%rcx),%rsi
 5cd:	mov    (%rax),%rax
 5d0:	mov    (%rdi),%rcx
 5d3:	mov    (%rdx),%rdx
 5d6:	mov    %rax,%rdi
 5d9:	call   *%r8
 5dc:	pop    %rax
 5dd:	ret
 5de:	xchg   %ax,%ax

00000000000005e0 <_mlir_pbk_task2>:
 5e0:	push   %rax
 5e1:	mov    (%rdi),%rax
 5e4:	mov    0x10(%rdi),%rdx
 5e8:	mov    0x8(%rdi),%rcx
 5ec:	mov    0x18(%rdi),%rdi
 5f0:	movabs $0x0,%r8
 5fa:	mov    (%rcx),%rsi
 5fd:	mov    (%rax),%rax
 600:	mov    (%rdi),%rcx
 603:	mov    (%rdx),%rdx
 606:	mov    %rax,%rdi
 609:	call   *%r8
 60c:	pop    %rax
 60d:	ret
 60e:	xchg   %ax,%ax

0000000000000610 <_mlir_pbk_main>:
 610:	push   %rax
 611:	mov    (%rdi),%rax
 614:	mov    0x10(%rdi),%rdx
 618:	mov    0x8(%rdi),%rcx
 61c:	mov    (%rax),%rax
 61f:	mov    (%rcx),%rsi
 622:	mov    (%rdx),%rdx
 625:	movabs $0x0,%rcx
 62f:	mov    %rax,%rdi
 632:	call   *%rcx
 634:	pop    %rax
 635:	ret
 636:	cs nopw 0x0(%rax,%rax,1)

0000000000000640 <_mlir_pbk_run>:
 640:	push   %rax
 641:	mov    0x8(%rdi),%rcx
 645:	mov    (%rdi),%rax
 648:	mov    (%rax),%rdi
 64b:	mov    (%rcx),%rsi
 64e:	movabs $0x0,%rax
 658:	call   *%rax
 65a:	pop    %rax
 65b:	ret
 65c:	nopl   0x0(%rax)

0000000000000660 <_mlir_pbk_call>:
 660:	push   %rax
 661:	mov    (%rdi),%rax
 664:	mov    (%rax),%rdi
 667:	movabs $0x0,%rax
 671:	call   *%rax
 673:	pop    %rax
 674:	ret
 675:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000680 <_mlir_pbk_handler>:
 680:	push   %rbx
 681:	mov    (%rdi),%rax
 684:	mov    %rdi,%rbx
 687:	mov    (%rax),%rdi
 68a:	movabs $0x0,%rax
 694:	call   *%rax
 696:	mov    0x8(%rbx),%rcx
 69a:	mov    %rax,(%rcx)
 69d:	pop    %rbx
 69e:	ret

